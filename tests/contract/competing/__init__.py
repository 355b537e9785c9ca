"""Mode Competing in the database."""
