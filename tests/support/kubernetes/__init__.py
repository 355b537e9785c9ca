"""The cluster, and what tests run on it."""
