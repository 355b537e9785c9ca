"""The shop that produces the demo's messages."""
