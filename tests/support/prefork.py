"""Python programs started from a process that has imported them: imports are most of what a short-lived one costs.

A test process starts one such server when it first needs it. Each program is a process forked from it, which from there
on is a program of its own: its arguments, environment, folder and files, its signals, its exit status. It shares with
its server what importing made, as two starts of one program do.

    python -m tests.support.prefork CONTROL PACKAGE...

serves requests that arrive at the socket CONTROL until that is closed.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import IO

PRELOADED: Final = ("outbox_core", "outbox_worker")
_REQUEST_BYTES: Final = 150_000
"""What one packet of a Unix socket may hold."""


class Process:
    """A forked program, as `subprocess.Popen` shows one."""

    def __init__(self, link: socket.socket) -> None:
        """Take the socket at which the server says the process id, and in the end the exit status."""
        self._link = link
        self.returncode: int | None = None
        said = link.recv(64)
        if not said:
            raise RuntimeError("the server of forked programs is gone")
        self.pid = int(said)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._receive(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it runs on.

        """
        status = self._receive(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _receive(self, timeout: float | None) -> int | None:
        if self.returncode is not None:
            return self.returncode
        self._link.settimeout(timeout)
        try:
            said = self._link.recv(64)
        except (BlockingIOError, TimeoutError):
            return None
        self._link.close()
        if not said:
            raise RuntimeError(f"the server of forked programs is gone, with process {self.pid}")
        self.returncode = int(said)
        return self.returncode


class Server:
    """The client's side of the server."""

    def __init__(self) -> None:
        """Start it; it imports while the test goes on."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.prefork", str(theirs.fileno()), *PRELOADED]
        with theirs:
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._control = ours
        atexit.register(self.close)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        out: IO[bytes],
        err: IO[bytes],
    ) -> Process:
        """Run `python -m module` in a process of its own."""
        request = {"module": module, "arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}
        # Packets: the process id and the exit status stay two, whoever is late.
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [out.fileno(), err.fileno(), theirs.fileno()]
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        return Process(link)

    def close(self) -> None:
        """End it; programs that still run go on."""
        self._control.close()
        self._server.wait()


@functools.cache
def server() -> Server:
    """The one of this process."""
    return Server()


def _serve(control: socket.socket) -> tuple[str, list[str]] | None:
    """Answer requests. In a forked process: return what it is to run."""
    running: dict[int, tuple[int, int]] = {}
    # poll(2) has no descriptor of its own, which a forked process would close under a file of its own.
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor in running:
                waiting.unregister(descriptor)
                os.close(descriptor)
                _tell_end(*running.pop(descriptor))
                continue
            request, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 3)
            if not request:
                return None
            out, err, link = descriptors
            pid = os.fork()
            if pid == 0:
                control.detach()
                return _become(json.loads(request), out, err)
            os.close(out)
            os.close(err)
            os.write(link, str(pid).encode())
            ends = os.pidfd_open(pid)
            running[ends] = pid, link
            waiting.register(ends, select.POLLIN)


def _tell_end(pid: int, link: int) -> None:
    _, status = os.waitpid(pid, 0)
    with suppress(ConnectionError):  # nobody asks any more
        os.write(link, str(os.waitstatus_to_exitcode(status)).encode())
    os.close(link)


def _become(request: dict[str, Any], out: int, err: int) -> tuple[str, list[str]]:
    """Take what the program is to have, and keep nothing of the server's."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, 4096)
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]  # as -m does
    os.environ.clear()
    os.environ.update(request["env"])
    return request["module"], request["arguments"]


def main() -> None:
    """Import, serve, and in a forked process be the program."""
    for name in sys.argv[2:]:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    assert threading.active_count() == 1, "a thread does not live on in a forked process"
    gc.freeze()
    chosen = _serve(socket.socket(fileno=int(sys.argv[1])))
    if chosen is not None:
        module, sys.argv[1:] = chosen
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
