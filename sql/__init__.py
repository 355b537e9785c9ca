"""The database half of the contract: numbered migrations, the text of each function, and the runner."""
