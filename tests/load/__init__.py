"""Load tests: programs that print a ledger, and are run small by the tests."""
