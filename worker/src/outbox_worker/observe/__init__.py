"""What the process says of itself and sees in the database: status, metrics, health, its last message."""
