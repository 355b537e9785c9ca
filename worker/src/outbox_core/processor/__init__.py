"""PURE: the state machine of a processor: outcomes, states, and what becomes of messages that fail."""
