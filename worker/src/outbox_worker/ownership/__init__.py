"""Claim, lease and membership: gained, renewed by the heartbeat, released."""
