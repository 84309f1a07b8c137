{{- define "shardmesh.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "shardmesh.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "shardmesh.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "shardmesh.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Of what lies in no namespace: two releases of one name must not meet there. */}}
{{- define "shardmesh.global" -}}
{{- printf "%s-%s" (include "shardmesh.fullname" .) .Release.Namespace -}}
{{- end }}

{{- define "shardmesh.selector" -}}
app.kubernetes.io/name: {{ include "shardmesh.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "shardmesh.labels" -}}
{{ include "shardmesh.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: shardmesh
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "shardmesh.image" -}}
{{- $image := .image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end }}

{{- define "shardmesh.daemonAccount" -}}
{{- default (printf "%s-daemon" (include "shardmesh.fullname" .)) .Values.daemon.serviceAccount.name -}}
{{- end }}

{{- define "shardmesh.webhookSecret" -}}
{{- if eq .Values.webhook.certificates.source "secret" -}}
{{- .Values.webhook.certificates.secretName -}}
{{- else -}}
{{- printf "%s-webhook-tls" (include "shardmesh.fullname" .) -}}
{{- end -}}
{{- end }}

{{/* The namespaces in which the operator works with Roles alone. */}}
{{- define "shardmesh.namespaces" -}}
{{- if .Values.watchNamespaces -}}{{ join "," .Values.watchNamespaces }}{{- else -}}{{ .Release.Namespace }}{{- end -}}
{{- end }}

{{/* What no container of ours may do. */}}
{{- define "shardmesh.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* What the operator does with what lies in a namespace; operator/meshoperator/kube/client.py has the same. */}}
{{- define "shardmesh.operatorRules" -}}
- apiGroups: [shardmesh.io]
  resources: [meshclusters, meshdatasets]
  verbs: [get, list, watch, patch]
- apiGroups: [shardmesh.io]
  resources: [meshviews]
  verbs: [get, watch, patch]
- apiGroups: [shardmesh.io]
  resources: [meshloads]
  verbs: [get, watch, patch, delete]
- apiGroups: [shardmesh.io]
  resources: [meshnodes]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [shardmesh.io]
  resources: [meshclusters/status, meshnodes/status, meshdatasets/status, meshloads/status, meshviews/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, update, patch, deletecollection]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch, delete, deletecollection]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update, deletecollection]
- apiGroups: [""]
  resources: [services]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [list, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, patch, deletecollection]
- apiGroups: [monitoring.coreos.com]
  resources: [servicemonitors]
  verbs: [create, patch, deletecollection]
{{- end }}

{{/* What the daemons do: their control store. */}}
{{- define "shardmesh.daemonRules" -}}
- apiGroups: [""]
  resources: [configmaps, secrets]
  verbs: [get, list, watch, create, update, delete]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, list, create, update, delete]
{{- end }}
