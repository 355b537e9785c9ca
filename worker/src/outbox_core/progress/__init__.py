"""PURE: how far a processor has examined the outbox: checkpoints of both cursors, and what they cover."""
