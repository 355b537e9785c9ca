"""Consumers of mode Competing."""
