"""Databases that the contract suite of feeds runs against: one in memory, and PostgreSQL."""
