{{- define "outbox-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/*
Name of every namespaced object: a DNS label that begins with a letter, as a Service's must; a release's name may have
dots and begin with a digit. Short enough that a pod's name and a Lease's still fit. A name that is changed for this
ends with a hash, so that two releases of one namespace have no object in common.
*/}}
{{- define "outbox-operator.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- $full = default $full .Values.fullnameOverride }}
{{- $label := regexReplaceAll "^[0-9]" (replace "." "-" $full) "r${0}" }}
{{- if and (eq $label $full) (le (len $label) 47) }}
{{- $label | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" ($label | trunc 38 | trimSuffix "-") ($full | sha256sum | trunc 8) }}
{{- end }}
{{- end }}

{{/* Name of a cluster-scoped object. The colon keeps release and namespace apart, so that two releases never share one. */}}
{{- define "outbox-operator.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "outbox-operator.fullname" .) }}
{{- end }}

{{- define "outbox-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "outbox-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Of the pod of `helm test`: not those that the operator's pods are selected by. */}}
{{- define "outbox-operator.testLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end }}

{{- define "outbox-operator.labels" -}}
{{ include "outbox-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/component: operator
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "outbox-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "outbox-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.create is false: name an existing one in serviceAccount.name" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "outbox-operator.driverRoleName" -}}
{{- default (printf "%s:spark-driver" (include "outbox-operator.clusterName" .)) .Values.spark.driverRole.name }}
{{- end }}

{{/* No image is published yet: a release without a registry and a tag of the user's could only end in ImagePullBackOff. */}}
{{- define "outbox-operator.imageRemedy" -}}
No image of outbox-operator is published yet. Build them from a clone and say where they are:
  on the local cluster:  make up images
      --set image.registry=localhost --set image.tag=dev
  on a cluster of yours: make push TO=registry.mycompany.net/outbox
      --set image.registry=registry.mycompany.net/outbox --set image.tag=dev
  loaded into the nodes: --set image.pullPolicy=Never --set image.tag=dev
{{- end }}

{{/* One image reference. Takes a list: the root context, the image's own values. */}}
{{- define "outbox-operator.image" -}}
{{- $root := index . 0 }}
{{- $image := index . 1 }}
{{- $registry := default $root.Values.image.registry $image.registry }}
{{- $remedy := include "outbox-operator.imageRemedy" $root }}
{{- if regexMatch "(^|\\.)example\\.(com|net|org)(:[0-9]+)?(/|$)" $registry }}
{{- fail (printf "\n\nimage.registry is %s, a name for examples: no node can pull from it.\n%s\n" $registry $remedy) }}
{{- end }}
{{- if not (or $registry (contains "/" $image.repository) (eq $root.Values.image.pullPolicy "Never")) }}
{{- fail (printf "\n\nimage.registry is not set.\n%s\n" $remedy) }}
{{- end }}
{{- if not (or $image.digest $image.tag $root.Values.image.tag) }}
{{- fail (printf "\n\nimage.tag is not set (nor the digest of %s).\n%s\n" $image.repository $remedy) }}
{{- end }}
{{- $path := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") }}
{{- if $image.digest }}
{{- printf "%s@%s" $path $image.digest }}
{{- else }}
{{- printf "%s:%s" $path (coalesce $image.tag $root.Values.image.tag) }}
{{- end }}
{{- end }}

{{/* A claim must name its cluster. A cluster-wide operator reads the uid of kube-system; a namespaced one may not. */}}
{{- define "outbox-operator.clusterId" -}}
{{- if and .Values.watchNamespaces (not .Values.clusterId) }}
{{- fail "\n\nclusterId is required when watchNamespaces is set: a namespaced operator cannot read the uid of kube-system.\nGive a name that is unique among the clusters that share a database, for example --set clusterId=production-eu\n" }}
{{- end }}
{{- .Values.clusterId }}
{{- end }}

{{/* Selects the pods of Spark processors. */}}
{{- define "outbox-operator.sparkPods" -}}
matchExpressions:
  - key: outbox-operator.dev/role
    operator: In
    values: [driver, executor]
{{- end }}
