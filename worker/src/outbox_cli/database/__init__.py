"""Commands that work on a database."""
