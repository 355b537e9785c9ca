{{/*
What the operator may do where it serves resources. tests/chart/permissions.py says the same, call by call; a test
compares the two. There is no verb on Secrets: they are mounted into pods and never read.
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
  resources: [events]
  verbs: [list, create, patch]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# A Spark driver's service account is bound to this one role and to no other.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [clusterroles]
  resourceNames: [{{ include "outbox-operator.driverRoleName" . | quote }}]
  verbs: [bind]
{{- end }}
