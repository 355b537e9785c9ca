"""Mode Competing: the consumer, its steps, and the messages of its batches that fail."""
