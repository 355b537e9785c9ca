"""What a person asks of a database at a terminal, and changes there."""
