"""What the operator knows of the cluster, whom it asks, and when."""
