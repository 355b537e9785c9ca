"""The operator as a process on this machine, to be killed and started again; pods are reached by their addresses."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.cluster import REGISTRY, kubeconfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def _listening_port() -> int:
    """Choose a free port below those that the kernel hands out: on a busy cluster one of them is soon taken."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


@dataclass
class OperatorProcess:
    """One operator under one identity: started again, it is the same replica."""

    namespaces: Sequence[str]
    lease_namespace: str
    logs: Path
    identity: str = "operator-0"
    port: int = field(default_factory=_listening_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it in the background."""
        served = [argument for name in self.namespaces for argument in ("--namespace", name)]
        command = [sys.executable, "-m", "outbox_operator", *served, "--cluster-id", "acceptance"]
        command += ["--lease-namespace", self.lease_namespace, "--lease-name", "killed", "--identity", self.identity]
        command += ["--port", str(self.port), "--worker-image", f"{REGISTRY}/outbox-worker:dev"]
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig())}
        with self.logs.open("ab") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """SIGKILL: nothing is released, nothing said."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(timeout=30)
        self.process = None
