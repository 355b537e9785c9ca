"""PURE: a span of time as people read it."""

from __future__ import annotations


def format_age(seconds: float) -> str:
    """Write a span of time shortly: 0.4s, 12s, 3m20s, 2h05m, 3d04h."""
    whole = int(seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"
