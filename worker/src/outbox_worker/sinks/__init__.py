"""Where messages go, one module for each target; none knows another. See `outbox_core.ports` for what they promise."""
