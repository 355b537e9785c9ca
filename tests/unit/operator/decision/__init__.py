"""What the operator decides, and what people read."""
