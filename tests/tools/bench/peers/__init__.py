"""Programs that peers run as, each in a process of its own."""
