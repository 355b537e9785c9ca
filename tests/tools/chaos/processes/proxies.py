"""Toxiproxy between the workers and their servers: one proxy for each case and server, ruled through its HTTP API."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from tests.support.cache import find_cached
from tests.support.servers.postgres import free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Proxies:
    """The one process, and its proxies by name."""

    def __init__(self, log: Path) -> None:
        """Start it."""
        self._ports: dict[str, int] = {}
        port = free_port()
        self._api = f"http://127.0.0.1:{port}"
        command = [str(find_cached("chaos", "bin", "toxiproxy")), "-host", "127.0.0.1", "-port", str(port)]
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

        def answers() -> bool:
            with contextlib.suppress(OSError):
                self._call("GET", "/version")
                return True
            return False

        wait_until(answers, "toxiproxy answers")

    def add(self, name: str, upstream: int) -> int:
        """Make a proxy; return its port."""
        port = self._ports.setdefault(name, free_port())
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
        with contextlib.ExitStack() as toxics:
            for stream in streams:
                toxic = {"name": f"{kind}-{stream}", "type": kind, "stream": stream, "attributes": attributes}
                toxics.callback(self._insist, "DELETE", f"/proxies/{name}/toxics/{toxic['name']}")
                self._call("POST", f"/proxies/{name}/toxics", toxic)
            yield

    def reset(self) -> None:
        """Let everything through."""
        self._insist("POST", "/reset")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _insist(self, method: str, path: str) -> None:
        """Ask until it is done, or nothing is left to do.

        Toxiproxy removes a toxic once the chunks in it are passed on. Where the server behind hangs or was killed, it
        tries so for seconds with each chunk, answers 503 or nothing meanwhile, and goes on: asked again, it says 404.
        """

        def is_done() -> bool:
            try:
                self._call(method, path, timeout=2)
            except urllib.error.HTTPError as error:
                if error.code not in {HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE}:
                    raise
                return error.code == HTTPStatus.NOT_FOUND
            except TimeoutError:
                return False
            return True

        wait_until(is_done, f"toxiproxy does {method} {path}")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 10) -> None:
        data = None if body is None else json.dumps(body).encode()
        # Its API refuses what looks like a browser; urllib's own name does not.
        request = urllib.request.Request(self._api + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=timeout):
            pass
