"""The checkpoint contract: storing, comparing, refusing."""
