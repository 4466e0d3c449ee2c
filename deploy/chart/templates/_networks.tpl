{{/*
A Network of the cluster itself, unless it is there already. Arguments: the root, its name, its type, its prefix, and
"fixed", "fixed shared" or "" for one that ipam may move.
*/}}
{{- define "weft.network" -}}
{{- $ := index . 0 }}{{ $name := index . 1 }}{{ $type := index . 2 }}{{ $holds := splitList " " (index . 4) }}
{{- $foreign := include "weft.isForeign" (list $ "ipam.liqo.io/v1alpha1" "Network" $.Release.Namespace $name) }}
{{- if not (or $foreign (include "weft.isHeld" (list $ $type (index . 3)))) }}
---
apiVersion: ipam.liqo.io/v1alpha1
kind: Network
metadata:
  name: {{ $name }}
  namespace: {{ $.Release.Namespace }}
  labels:
    {{- include "weft.labels" (list $ "ipam" "ipam") | nindent 4 }}
    ipam.liqo.io/network-type: {{ $type }}
    {{- if has "fixed" $holds }}
    ipam.liqo.io/network-not-remapped: "true"
    {{- end }}
    {{- if has "shared" $holds }}
    ipam.liqo.io/network-shared: "true"
    {{- end }}
  annotations:
    liqo.io/preinstalled: "true"
    {{- include "weft.sharedAnnotations" $ | nindent 4 }}
spec:
  cidr: {{ index . 3 | quote }}
  {{- if hasPrefix "external-cidr" $type }}
  # Liqo's "unknown source", which is never granted.
  preAllocated: 1
  {{- end }}
{{- end }}
{{- end }}

{{/*
"true" if another release, or the user, has a Network of that type and prefix under whatever name: Liqo's chart names that
of pods in two ways. Arguments: the root, the type, the prefix.
*/}}
{{- define "weft.isHeld" -}}
{{- $ := index . 0 }}{{ $type := index . 1 }}{{ $cidr := index . 2 }}{{ $found := false }}
{{- if $.Capabilities.APIVersions.Has "ipam.liqo.io/v1alpha1" }}
{{- range (lookup "ipam.liqo.io/v1alpha1" "Network" $.Release.Namespace "").items }}
{{- $is := and (eq (dig "metadata" "labels" "ipam.liqo.io/network-type" "" .) $type) (eq .spec.cidr $cidr) }}
{{- if and $is (not (include "weft.isOurs" (list $ .))) }}{{ $found = true }}{{ end }}
{{- end }}
{{- end }}
{{- if $found }}true{{ end }}
{{- end }}

{{/*
Stops unless the cluster has a Network of that type already. Arguments: the root, the type, the message.
*/}}
{{- define "weft.requireNetwork" -}}
{{- $ := index . 0 }}{{ $type := index . 1 }}{{ $found := false }}
{{- if $.Capabilities.APIVersions.Has "ipam.liqo.io/v1alpha1" }}
{{- range (lookup "ipam.liqo.io/v1alpha1" "Network" $.Release.Namespace "").items }}
{{- if eq (dig "metadata" "labels" "ipam.liqo.io/network-type" "" .) $type }}{{ $found = true }}{{ end }}
{{- end }}
{{- end }}
{{- if not $found }}{{ fail (index . 2) }}{{ end }}
{{- end }}
