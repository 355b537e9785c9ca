"""Where a partition's batches come from, and where they are acknowledged."""
