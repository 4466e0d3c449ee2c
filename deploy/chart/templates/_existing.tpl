{{/*
"true" if an object is there that this release has not made: Liqo's own chart has, or the user. Such objects are left
alone. Arguments: the root, API version, kind, namespace, name.
*/}}
{{- define "weft.isForeign" -}}
{{- $ := index . 0 -}}
{{- /* lookup stops at a kind that the cluster does not know. */ -}}
{{- if $.Capabilities.APIVersions.Has (index . 1) -}}
{{- with lookup (index . 1) (index . 2) (index . 3) (index . 4) -}}
{{- if not (include "weft.isOurs" (list $ .)) -}}true{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
Annotations of what Liqo's chart would make, too. With `helm --take-ownership` it is another release's from then on;
this one, which no longer has it, would delete it at its next upgrade.
*/}}
{{- define "weft.sharedAnnotations" -}}
helm.sh/resource-policy: keep
{{- end }}

{{/*
"true" if this release has made the object. Arguments: the root, the object as it is in the cluster.
*/}}
{{- define "weft.isOurs" -}}
{{- $release := (index . 0).Release -}}
{{- $annotations := dig "metadata" "annotations" dict (index . 1) -}}
{{- $name := get $annotations "meta.helm.sh/release-name" -}}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" -}}
{{- if and (eq $name $release.Name) (eq $namespace $release.Namespace) -}}true{{- end -}}
{{- end }}

{{/*
"true" if Liqo's controller-manager, or anything else with that label, runs beside. liqoctl expects exactly one.
Argument: the root.
*/}}
{{- define "weft.isBesideLiqo" -}}
{{- $found := false -}}
{{- range (lookup "apps/v1" "Deployment" .Release.Namespace "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- if and (eq (get $labels "app.kubernetes.io/name") "controller-manager") (not (include "weft.isOurs" (list $ .))) -}}
{{- $found = true -}}
{{- end -}}
{{- end -}}
{{- if $found -}}true{{- end -}}
{{- end }}
