{{/*
Not empty if the API server evaluates policies.
*/}}
{{- define "weft.hasPolicies" -}}
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}true{{ end }}
{{- end }}

{{/*
A policy for requests of service accounts, in force everywhere. Arguments: the root, its name, the accounts of this release
or ["gw-"] for those of gateways, which are in the namespace that they write to or in one of liqoctl's, the rest of its spec, and the parameters that it is bound to, if any.
*/}}
{{- define "weft.policy" -}}
{{- $ := index . 0 }}{{ $name := index . 1 }}
{{- $labels := include "weft.labels" (list $ "policies" "networking") -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  failurePolicy: Fail
  matchConditions:
    - name: by-weft
      expression: >-
        {{ if eq (first (index . 2)) "gw-" }}request.userInfo.username.startsWith('system:serviceaccount:' + request.namespace + ':gw-')
        || request.userInfo.username.matches('^system:serviceaccount:liqo-tenant-[^:]*:gw-')
        {{- else }}request.userInfo.username in [
        {{- range $i, $account := index . 2 }}{{ if $i }}, {{ end }}'system:serviceaccount:{{ $.Release.Namespace }}:{{ $account }}'{{ end }}]
        {{- end }}
  {{- index . 3 | nindent 2 }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  policyName: {{ $name }}
  {{- if gt (len .) 4 }}
  paramRef:
    {{- index . 4 | nindent 4 }}
  {{- end }}
  validationActions: [Deny]
{{- end }}

{{/*
CEL: true where weft's accounts write. What is in the namespace of the release, where there are other Secrets, may go.
*/}}
{{- define "weft.isOfPeering" -}}
request.operation == 'DELETE' && namespaceObject.metadata.name == '{{ .Release.Namespace }}'
|| {{ include "weft.isTenant" . }}
{{- end }}

{{/*
CEL: true in namespaces of peerings.
*/}}
{{- define "weft.isTenant" -}}
namespaceObject.metadata.name.startsWith('liqo-tenant-')
|| namespaceObject.metadata.?labels[?'liqo.io/tenant-namespace'].orValue('') == 'true'
{{- end }}

{{/*
CEL: message for other namespaces.
*/}}
{{- define "weft.isOfNoPeering" -}}
"namespace " + namespaceObject.metadata.name + " is not one of a peering; expected the label liqo.io/tenant-namespace=true:
kubectl label namespace " + namespaceObject.metadata.name + " liqo.io/tenant-namespace=true --overwrite"
{{- end }}
