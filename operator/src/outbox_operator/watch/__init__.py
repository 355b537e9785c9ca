"""What watches and listings have told of the cluster, and which resource is reconciled next."""
