"""Other products on the cluster: Argo CD, Prometheus, the HorizontalPodAutoscaler."""
