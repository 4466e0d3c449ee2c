{{/*
Metadata of a pod. Arguments: the root, the values of the pod, the program, its labels.
*/}}
{{- define "weft.podMetadata" -}}
{{- $pod := index . 1 -}}
{{- with $pod.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
labels:
  fabric.weft.dev/program: {{ index . 2 }}
  {{- index . 3 | nindent 2 }}
  {{- with $pod.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/*
Where and how a pod of the control plane runs. Arguments: the root, the values of the pod.
*/}}
{{- define "weft.placement" -}}
{{- $ := index . 0 -}}
{{- include "weft.pullSecrets" $ }}
{{- with (index . 1).priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $.Values.common.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
# Of a pod on a node that has died there is another one soon, not after Kubernetes' five minutes.
tolerations:
  {{- include "weft.tolerations" $.Values.common.tolerations | trim | nindent 2 }}
{{- with $.Values.common.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/*
Keeps replicas on nodes of their own, as far as there are some. Arguments: the root, the program.
*/}}
{{- define "weft.spread" -}}
{{- $ := index . 0 -}}
{{- if not $.Values.common.affinity -}}
topologySpreadConstraints:
  - topologyKey: kubernetes.io/hostname
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels:
        {{- include "weft.selector" . | nindent 8 }}
{{- end }}
{{- end }}

{{/*
Lets no drain take all replicas at once. Arguments: the root, the component, the number of replicas.
*/}}
{{- define "weft.budget" -}}
{{- $ := index . 0 -}}
{{- if gt (int (index . 2)) 1 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: liqo-{{ index . 1 }}
  namespace: {{ $.Release.Namespace }}
  labels:
    {{- include "weft.labels" (list $ (index . 1) (index . 1)) | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "weft.selector" (list $ (index . 1)) | nindent 6 }}
{{- end }}
{{- end }}

{{/*
Tolerations, and of a node that is lost for a few seconds only, unless they say otherwise. Argument: the tolerations.
*/}}
{{- define "weft.tolerations" -}}
{{- $all := default list . -}}
{{- range $key := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" }}
{{- $known := false }}
{{- range $all }}{{ if or (not .key) (eq (toString .key) $key) }}{{ $known = true }}{{ end }}{{ end }}
{{- if not $known }}
{{- $all = append $all (dict "key" $key "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" 5) }}
{{- end }}
{{- end }}
{{- toYaml $all }}
{{- end }}

{{- define "weft.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
What needs nothing but the network.
*/}}
{{- define "weft.noRights" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/*
Port of metrics and probes, as an argument, and the probe for which a pod is started anew. Argument: the port.
*/}}
{{- define "weft.httpArg" -}}
- --http=[::]:{{ . }}
{{- end }}
{{- define "weft.httpPort" -}}
- {name: metrics, containerPort: {{ . }}}
{{- end }}
{{- define "weft.liveness" -}}
# The main loop turns; a host that stands still is no reason.
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  timeoutSeconds: 5
{{- end }}

{{/*
Arguments that every program has, and the user's own. Arguments: the root, the values of the pod.
*/}}
{{- define "weft.moreArgs" -}}
{{- $ := index . 0 -}}
- --log-format={{ $.Values.log.format }}
- --log-level={{ $.Values.log.level }}
{{- with concat $.Values.common.extraArgs (index . 1).extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}
