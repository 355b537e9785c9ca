"""PURE: bytes as text of which each character is one byte (ISO 8859-1).

Encoders put a message together as such text, and it becomes bytes at the end: one formatted string for a message takes
half of the time that bytes take.
"""

from __future__ import annotations


def characters(data: bytes) -> str:
    """Return bytes as such text."""
    return data.decode("latin-1")


def utf8(text: str) -> str:
    """Return any text in UTF-8, as such text."""
    return text if text.isascii() else characters(text.encode())
