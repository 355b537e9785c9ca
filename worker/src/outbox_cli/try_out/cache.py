"""What is kept between runs: packages and prepared data. Of the standard library only: `worker/try.py` begins here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def cache_folder() -> Path:
    """Name the folder that is kept."""
    named = os.environ.get("OUTBOX_CACHE")
    return (Path(named) if named else Path.home() / ".cache" / "outbox-operator") / "try"


def sweep(cache: Path, prefix: str) -> None:
    """Remove what runs left that were killed while they made it; `prefix` stands before the process id of each."""
    for left in cache.glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix)
        if not (pid.isdecimal() and lives(int(pid))):
            shutil.rmtree(left, ignore_errors=True)


def lives(pid: int) -> bool:
    """Say whether a process of this user is there and has not ended."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False  # gone, or the number is another user's program by now
    try:
        # A process whose parent was killed stays as a zombie where process 1 waits for none. Elsewhere than on Linux
        # there is no such file.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
