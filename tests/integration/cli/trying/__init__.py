"""`outbox try`."""
