"""Partitions and their barrier in the database."""
