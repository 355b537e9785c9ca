"""Commands that work on a cluster's resources; `client.py` alone talks to the API server."""
