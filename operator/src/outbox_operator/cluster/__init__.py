"""Calls to the Kubernetes API: objects, Events, the operator's own Secret, and the election's Lease."""
