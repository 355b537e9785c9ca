"""The Kafka client for the target `kafka`: the Secret's settings, one producer, and what its answers mean."""
