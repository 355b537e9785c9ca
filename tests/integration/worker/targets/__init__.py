"""Workers with each target."""
