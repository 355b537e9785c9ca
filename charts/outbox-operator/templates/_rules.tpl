{{/*
What the operator may do where it serves resources. tests/chart/permissions.py says the same, call by call; a test
compares the two. No Secret can be read: users' are mounted into pods, and a resource's key is made, never looked at.
*/}}
{{- define "outbox-operator.rules" -}}
- apiGroups: [outbox-operator.dev]
  resources: [outboxprocessors]
  verbs: [get, list, watch, patch]
- apiGroups: [outbox-operator.dev]
  resources: [outboxprocessors/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
# The link between a pod and its Deployment: whose a pod is.
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list, watch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# A Spark driver's service account is bound to this one role and to no other.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [clusterroles]
  resourceNames: [{{ include "outbox-operator.driverRoleName" . | quote }}]
  verbs: [bind]
{{- end }}

{{- define "outbox-operator.clusterRules" -}}
{{- if not .Values.clusterId }}
# Its uid is the cluster's id in claims.
- apiGroups: [""]
  resources: [namespaces]
  resourceNames: [kube-system]
  verbs: [get]
{{- end }}
{{- end }}

{{- define "outbox-operator.leaderRules" -}}
# RBAC cannot limit "create" to a name.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "outbox-operator.fullname" . }}]
  verbs: [get, update]
{{- end }}

{{- define "outbox-operator.keyRules" -}}
# The only Secrets that it can read: made by this chart, filled by the operator.
{{- $name := include "outbox-operator.fullname" . }}
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ $name }}-key, {{ $name }}-metrics-token]
  verbs: [get, update]
{{- end }}

{{/* A role and its binding to the operator. Takes a list: the root context, namespace (empty: the cluster), name, rules. */}}
{{- define "outbox-operator.role" }}
{{- $root := index . 0 }}
{{- $namespace := index . 1 }}
{{- $kind := ternary "Role" "ClusterRole" (ne $namespace "") }}
{{- $meta := dict "name" (index . 2) "labels" (include "outbox-operator.labels" $root | fromYaml) }}
{{- if $namespace }}
{{- $_ := set $meta "namespace" $namespace }}
{{- end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata:
  {{- toYaml $meta | nindent 2 }}
rules:
  {{- index . 3 | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  {{- toYaml $meta | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $kind }}
  name: {{ index . 2 }}
subjects:
  - kind: ServiceAccount
    name: {{ include "outbox-operator.serviceAccountName" $root }}
    namespace: {{ $root.Release.Namespace }}
{{- end }}
