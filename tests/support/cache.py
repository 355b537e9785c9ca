"""What `tests/tools/cluster/setup.sh` put into the cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

CACHE = Path(os.environ.get("OUTBOX_CACHE") or Path.home() / ".cache" / "outbox-operator")
_VERSIONS = Path(__file__).resolve().parents[1] / "tools" / "cluster" / "versions.sh"


def find_cached(part: str, *path: str) -> Path:
    """Return a file or folder that a part of setup.sh made.

    Raises:
        FileNotFoundError: it is not there.

    """
    found = CACHE.joinpath(*path)
    if not found.exists():
        raise FileNotFoundError(f"no {found}: run tests/tools/cluster/setup.sh {part}")
    return found


def read_version(name: str) -> str:
    """Return what versions.sh pins under a name."""
    (version,) = re.findall(rf"^{name}=(\S+)$", _VERSIONS.read_text(), re.MULTILINE)
    return str(version)
