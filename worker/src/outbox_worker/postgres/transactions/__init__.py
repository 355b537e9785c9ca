"""The transaction of a batch: its fence, its savepoints, and the connection that a user's handler gets."""
