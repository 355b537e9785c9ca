"""The user's statement or function: found, bounded, and given its messages."""
