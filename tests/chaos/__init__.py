"""Chaos in `make test`; the program is in tests/tools/chaos."""
