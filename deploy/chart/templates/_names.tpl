{{/*
Labels of an object. Arguments: the root, app.kubernetes.io/name, app.kubernetes.io/component.
*/}}
{{- define "weft.labels" -}}
{{- $ := index . 0 -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/component: {{ index . 2 }}
{{ include "weft.commonLabels" $ }}
{{- end }}

{{- define "weft.commonLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: weft
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/*
Labels by which the pods of a program differ from all others, now and after every upgrade. Arguments: the root, the program.
*/}}
{{- define "weft.selector" -}}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
fabric.weft.dev/program: {{ index . 1 }}
{{- end }}

{{/*
Name of an image. One that has a registry, as all do whose first part can be a host, is whole. Arguments: the root,
the values of an image.
*/}}
{{- define "weft.image" -}}
{{- $ := index . 0 -}}{{- $image := index . 1 -}}
{{- $first := splitList "/" $image.name | first -}}
{{- if not (or (eq $first "localhost") (regexMatch "[.:]" $first)) -}}{{ $.Values.registry }}/{{- end -}}
{{ $image.name }}:{{ $image.version | default $.Values.tag | default $.Chart.AppVersion }}
{{- end }}

{{/*
A prefix as part of a name. Argument: the prefix.
*/}}
{{- define "weft.dashed" -}}
{{ regexReplaceAll "[^a-z0-9]+" (lower .) "-" | trimSuffix "-" }}
{{- end }}
