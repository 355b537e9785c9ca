"""Workers of divided processors."""
