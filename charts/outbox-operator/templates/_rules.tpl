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
