"""What `make try` runs: `outbox try` from a clone, with nothing installed and nothing left in the clone.

It needs Python 3.11 and its standard library. The few packages that `outbox try` imports are put into a folder of the
cache, exactly as `requirements-try.lock` says, by uv where there is one, else by pip; the project's own packages are
found in the clone. Compiled bytecode goes to the cache too.

    python3 worker/try.py --seconds 30      options as of `outbox try`
"""

from __future__ import annotations

import signal

# Ctrl-C ends the process at once until `outbox try` takes the signals: nothing is made before that has to be removed,
# but in `find_packages`. It stands before the other imports, which take long on a busy machine.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

BEGAN = time.time()
ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "worker" / "requirements-try.lock"
OLDEST = (3, 11)

sys.path.insert(0, str(ROOT / "worker" / "src"))
sys.dont_write_bytecode = True  # until `main` says where to: nothing is left in the clone
from outbox_cli.try_out.cache import cache_folder, sweep

ended: list[int] = []
"""The signal that came."""


class Ended(BaseException):
    """A signal came."""


def main() -> int:
    """Put the packages there, and become `outbox try`."""
    if sys.version_info < OLDEST:
        fail(
            f"Python {OLDEST[0]}.{OLDEST[1]} or later is needed, and python3 is {platform.python_version()}: "
            "make try PYTHON=python3.12"
        )
    cache = cache_folder()
    packages = find_packages(cache)
    paths = [packages, ROOT / "worker" / "src", ROOT / "operator" / "src", name_sql(cache)]
    sys.path[:0] = [str(path) for path in paths]
    sys.pycache_prefix = str(cache / "bytecode")
    sys.dont_write_bytecode = False
    # For the programs that the run puts into its folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ["OUTBOX_TRY_BEGAN"] = repr(BEGAN)
    from outbox_cli.try_out.run import main as run

    return run(sys.argv[1:])


def find_packages(cache: Path) -> Path:
    """Return the folder with what the lock names for this Python, made now if it is not there."""
    key = f"{sys.version} {sys.implementation.cache_tag} {platform.platform()}".encode() + LOCK.read_bytes()
    folder = cache / f"packages-{hashlib.sha256(key).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    print("getting the packages: once for each version", flush=True)
    made = cache / f".packages-{os.getpid()}"
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        sweep(cache, ".packages-")
        install(made)
        with contextlib.suppress(OSError):  # another run was faster
            made.rename(folder)
    except OSError as err:
        fail(f"{err.filename or cache} cannot be written ({err.strerror}): name another folder with OUTBOX_CACHE=DIR")
    except Ended:
        pass
    finally:
        shutil.rmtree(made, ignore_errors=True)
    if ended:  # asked here, because an exception can be lost: Python ignores those of callbacks
        sys.exit(128 + ended[0])
    for number, handler in before.items():
        signal.signal(number, handler)
    return folder


def end(number: int, _frame: object) -> NoReturn:
    """End, and let nothing interrupt that."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    ended.append(number)
    raise Ended


def install(folder: Path) -> None:
    """Fill the folder."""
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(folder), "-r", str(LOCK)]
    uv = find_uv()
    if uv is not None:
        command = [uv, "pip", "install", "--quiet", "--no-progress", "--python", sys.executable, *options]
    else:
        pip = [sys.executable, "-m", "pip"]
        if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
            fail("neither uv nor pip is there: install uv (https://docs.astral.sh/uv), or the package python3-pip")
        command = [
            *pip,
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
            "--no-cache-dir",
            *options,
        ]
    # A group of its own: pip starts programs too (rustc, to name it to the registry), and all of them have to end.
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said = child.communicate()[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode:
        fail(explain(said))


def find_uv() -> str | None:
    """Find uv on the PATH, or the one of the project's own environment."""
    found = shutil.which("uv")
    if found is not None:
        return found
    installed = sorted((cache_folder().parent / "uv").glob("*/bin/uv"))
    return str(installed[-1]) if installed else None


def explain(said: str) -> str:
    """Say why the packages could not be had."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = said.lower()
    if "no space left" in text or "disk quota" in text:
        return (
            f"no room is left for the packages in {cache_folder()}: make room, or name another folder with "
            "OUTBOX_CACHE=DIR"
        )
    # pip's `from versions: none`: not one version was found of a package that has many.
    unreachable = ("dns", "connect", "resolve", "network", "timed out", "offline", "from versions: none")
    if any(word in text for word in unreachable):
        return (
            "the packages cannot be fetched: the package registry cannot be reached. Is there a network? A mirror is "
            f"named with UV_INDEX_URL or PIP_INDEX_URL, a proxy with HTTPS_PROXY. The last line was: {lines[-1]}"
        )
    return "the packages cannot be installed: " + " / ".join(lines[-3:])


def name_sql(cache: Path) -> Path:
    """Return a folder in which `sql/` has the name of its package."""
    folder = cache / f"clone-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:16]}"
    link = folder / "outbox_sql"
    if not link.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(ROOT / "sql", target_is_directory=True)
    return folder


def fail(message: str) -> NoReturn:
    """End with a sentence."""
    print(f"outbox try: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
