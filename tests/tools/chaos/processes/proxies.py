"""Toxiproxy between the workers and their servers: one proxy for each case and server, ruled through its HTTP API."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.support.servers.postgres import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

API: Final = "http://127.0.0.1:8474"
_FIRST_PORT: Final = 20_001


def program() -> Path:
    """Return toxiproxy's server in the cache.

    Raises:
        FileNotFoundError: it was not built.

    """
    cache = Path(os.environ.get("OUTBOX_CACHE", Path.home() / ".cache" / "outbox-operator"))
    found = cache / "bin" / "toxiproxy"
    if not found.exists():
        raise FileNotFoundError(f"no toxiproxy at {found}: run tests/tools/cluster/setup.sh chaos")
    return found


class Proxies:
    """The one process, and its proxies by name."""

    def __init__(self, log: Path) -> None:
        """Start it."""
        self._ports: dict[str, int] = {}
        with log.open("w") as out:
            subprocess.Popen(
                [str(program()), "-host", "127.0.0.1", "-port", "8474"], stdout=out, stderr=subprocess.STDOUT
            )

        def answers() -> bool:
            with contextlib.suppress(OSError):
                self._call("GET", "/version")
                return True
            return False

        wait_until(answers, "toxiproxy answers")

    def add(self, name: str, upstream: int) -> int:
        """Make a proxy; return its port."""
        port = self._ports.setdefault(name, _FIRST_PORT + len(self._ports))
        proxy = {"name": name, "listen": f"127.0.0.1:{port}", "upstream": f"127.0.0.1:{upstream}", "enabled": True}
        self._call("POST", "/proxies", proxy)
        return port

    @contextlib.contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """Every connection is closed, and new ones are refused."""
        self._call("POST", f"/proxies/{name}", {"enabled": False})
        try:
            yield
        finally:
            self._call("POST", f"/proxies/{name}", {"enabled": True})

    @contextlib.contextmanager
    def toxic(
        self, name: str, kind: str, attributes: dict[str, int], *, streams: Sequence[str] = ("upstream", "downstream")
    ) -> Iterator[None]:
        """These directions have this toxic: latency (ms), timeout (0: silence until the end), limit_data (bytes)."""
        for stream in streams:
            toxic = {"name": f"{kind}-{stream}", "type": kind, "stream": stream, "attributes": attributes}
            self._call("POST", f"/proxies/{name}/toxics", toxic)
        try:
            yield
        finally:
            for stream in streams:
                self._call("DELETE", f"/proxies/{name}/toxics/{kind}-{stream}")

    def reset(self) -> None:
        """Let everything through."""
        self._call("POST", "/reset")

    @staticmethod
    def _call(method: str, path: str, body: dict[str, Any] | None = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        # Its API refuses what looks like a browser; urllib's own name does not.
        request = urllib.request.Request(API + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=10):
            pass
