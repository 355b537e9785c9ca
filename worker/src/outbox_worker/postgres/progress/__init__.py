"""Checkpoints in the database: stored, compared, started from others, and open conflicts."""
