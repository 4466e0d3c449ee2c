{{/*
A service account, and what it may do in all namespaces. Arguments: the root, its name, its component, the rules.
*/}}
{{- define "weft.account" -}}
{{- $ := index . 0 }}{{ $name := index . 1 }}
{{- $labels := include "weft.labels" (list $ (index . 2) (index . 2)) -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  namespace: {{ $.Release.Namespace }}
  labels:
    {{- $labels | nindent 4 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
rules:
  {{- index . 3 | nindent 2 }}
---
{{ include "weft.binding" (list $ $name $name $labels) }}
{{- end }}

{{/*
Gives a service account a ClusterRole. Arguments: the root, the account, the role, labels.
*/}}
{{- define "weft.binding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ ternary (index . 1) (printf "%s-grants-%s" (index . 1) (index . 2)) (eq (index . 1) (index . 2)) }}
  labels:
    {{- index . 3 | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ index . 2 }}
subjects:
  - kind: ServiceAccount
    name: {{ index . 1 }}
    namespace: {{ (index . 0).Release.Namespace }}
{{- end }}

{{/*
What an account may do in its own namespace. Arguments: the root, the account, its component, the rules.
*/}}
{{- define "weft.ownRole" -}}
{{- $ := index . 0 }}{{ $name := index . 1 }}
{{- $labels := include "weft.labels" (list $ (index . 2) (index . 2)) -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ $.Release.Namespace }}
  labels:
    {{- $labels | nindent 4 }}
rules:
  {{- index . 3 | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ $.Release.Namespace }}
  labels:
    {{- $labels | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: {{ $name }}
    namespace: {{ $.Release.Namespace }}
{{- end }}
