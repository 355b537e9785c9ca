"""Messages that are handed out other than by a checkpoint: held, given up, claimed batches."""
