"""The state machine and what it rests on."""
