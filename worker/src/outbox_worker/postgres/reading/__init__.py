"""Reads the outbox: tables, indexes, both cursors, and who holds the high-water mark back."""
