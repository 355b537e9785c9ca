"""Unit tests of what a worker may hand over next, and what it looks for."""
