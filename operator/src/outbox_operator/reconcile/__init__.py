"""The loop of one resource: observe, decide, apply; and the questions to its workers' pods."""
