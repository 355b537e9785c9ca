"""Pure parts of the operator."""
