"""Unit tests of the worker's feeds: when they read what."""
