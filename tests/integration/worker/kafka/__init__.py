"""Workers with target `kafka`."""
