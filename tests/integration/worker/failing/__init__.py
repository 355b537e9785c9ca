"""Workers whose messages fail."""
