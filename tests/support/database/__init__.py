"""Sessions in a test's database: producers, consumers, callers of the contract."""
