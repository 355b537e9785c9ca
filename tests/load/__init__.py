"""Programs that measure, run by hand; nothing here is a test."""
