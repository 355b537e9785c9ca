"""A real RabbitMQ server for a test session: its own node name, ports, port mapper and directories."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pamqp import commands

from tests.support.servers.certificates import make_certificates
from tests.support.servers.postgres import free_port, wait_until
from tests.tools.ledger.amqp import Broker, BrokerError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROGRAMS = Path("/usr/lib/rabbitmq/bin")
_CONFIGURATION = """
listeners.tcp.1 = 127.0.0.1:{port}
listeners.ssl.1 = 127.0.0.1:{tls_port}
ssl_options.cacertfile = {directory}/ca.crt
ssl_options.certfile = {directory}/server.crt
ssl_options.keyfile = {directory}/server.key
ssl_options.verify = verify_none
loopback_users.guest = false
default_user = tests
default_pass = s3cret word
stream.listeners.tcp.1 = 127.0.0.1:{stream_port}
stream.listeners.ssl.1 = {address}:{stream_tls_port}
log.console = true
log.console.level = warning
log.file = false
"""


def _own(command: list[str]) -> list[str]:
    user = ["--reuid=rabbitmq", "--regid=rabbitmq", "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *user, "--pdeathsig=TERM", *command]


class RabbitmqServer:
    """One node. `stop` and `start` keep its data."""

    def __init__(
        self,
        *,
        patience: float = 180,
        emulator: str = "+S 1:1 +sbwt none +A 4",
        settings: tuple[str, ...] = (),
        host: str = "",
    ) -> None:
        """Start one.

        `patience` is how many seconds each start may take, `emulator` what Erlang is told, `settings` more lines of
        its configuration, `host` an address of this machine where others reach the streams' listener with TLS.
        """
        self._patience, self._host = patience, host
        if not (_PROGRAMS / "rabbitmq-server").exists():
            raise FileNotFoundError("no RabbitMQ: run tests/tools/cluster/setup.sh rabbitmq")
        self.directory = Path(tempfile.mkdtemp(prefix="outbox-rabbitmq-", dir="/tmp"))
        self.port, self.tls_port = free_port(), free_port()
        self.stream_port, self.stream_tls_port = free_port(), free_port()
        self._mapper_port, self._distribution_port = free_port(), free_port()
        make_certificates(self.directory, f"IP:{host}" if host else "DNS:localhost")
        configuration = _CONFIGURATION.format(
            port=self.port, tls_port=self.tls_port, stream_port=self.stream_port, stream_tls_port=self.stream_tls_port,
            directory=self.directory, address=host or "127.0.0.1",
        )  # fmt: skip
        (self.directory / "rabbitmq.conf").write_text("\n".join([configuration, *settings, ""]))
        (self.directory / "enabled_plugins").write_text("[rabbitmq_stream].\n")
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory),
            "ERL_EPMD_PORT": str(self._mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"outbox-{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"),
            "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "none.conf"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": emulator,
            "LANG": "C.UTF-8",
        }
        if os.geteuid() == 0:
            subprocess.run(["chown", "-R", "rabbitmq:rabbitmq", str(self.directory)], check=True)
        self._mapper = subprocess.Popen(_own(["epmd", "-port", str(self._mapper_port)]), env=self._environment)
        self._node: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        """The process id of the node, below which everything of it runs."""
        assert self._node is not None
        return self._node.pid

    @property
    def uri(self) -> str:
        return f"amqp://tests:s3cret%20word@127.0.0.1:{self.port}/"

    @property
    def stream_uri(self) -> str:
        return f"rabbitmq-stream://tests:s3cret%20word@127.0.0.1:{self.stream_port}/"

    @property
    def secure_stream_secret(self) -> dict[str, str]:
        """The keys of a target's Secret for the streams' listener with TLS."""
        uri = f"rabbitmq-stream+tls://tests:s3cret%20word@{self._host or 'localhost'}:{self.stream_tls_port}/"
        return {"uri": uri, "ca.crt": (self.directory / "ca.crt").read_text()}

    def start(self) -> None:
        """Start the node and wait until a client can log in."""
        with (self.directory / "console").open("ab") as console:
            self._node = subprocess.Popen(
                _own([str(_PROGRAMS / "rabbitmq-server")]),
                env=self._environment,
                stdout=console,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        node = self._node

        def answers() -> bool:
            assert node.poll() is None, (self.directory / "console").read_text(errors="replace")
            with contextlib.suppress(OSError, BrokerError), self.client():
                return True
            return False

        wait_until(answers, "RabbitMQ answers", seconds=self._patience)

    def stop(self) -> None:
        """Stop the node as a crash would."""
        if self._node is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(self._node.pid, signal.SIGKILL)
            self._node.wait()
            self._node = None

            def gone() -> bool:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return False
                return True

            wait_until(gone, "RabbitMQ is down")

    def close(self) -> None:
        self.stop()
        self._mapper.terminate()
        self._mapper.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def control(self, *arguments: str) -> str:
        """`rabbitmqctl` against this node."""
        done = subprocess.run(
            _own([str(_PROGRAMS / "rabbitmqctl"), "--quiet", *arguments]),
            env=self._environment, check=True, capture_output=True, text=True, cwd=self.directory, timeout=60,
        )  # fmt: skip
        return done.stdout

    def client(self) -> Broker:
        return Broker("127.0.0.1", self.port, "tests", "s3cret word")

    @contextlib.contextmanager
    def queue(self, name: str, exchange: str = "", **arguments: Any) -> Iterator[Broker]:
        """A queue of one test, bound to a topic exchange if one is named."""
        with self.client() as client:
            declare = commands.Queue.Declare(queue=name, durable=True, arguments=arguments)
            client._call(declare, commands.Queue.DeclareOk)
            if exchange:
                client.declare(name, exchange)
            yield client
        with self.client() as client:
            client._call(commands.Queue.Delete(queue=name), commands.Queue.DeleteOk)
