"""The brokers that the cases publish to, each case to an exchange, stream or topic of its own, through its proxy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.servers.kafka import KafkaServer
from tests.support.servers.postgres import free_port
from tests.support.servers.rabbitmq import RabbitmqServer
from tests.support.streams import STREAM
from tests.tools.chaos.cases import PARTITIONS, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tools.chaos.cases import Case
    from tests.tools.chaos.processes.proxies import Proxies

PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Of our own network namespace."""
SESSION: Final = "broker.session.timeout.ms=9000"
"""As Kafka has it by default: a freeze is shorter. A broker that lost its session has partitions without a leader when
it wakes, and may forget to end a transaction there, as one that was killed (docs/kafka.md)."""


class Brokers:
    """Those that the cases need."""

    def __init__(self, cases: Sequence[Case], proxies: Proxies, directory: Path, patience: float) -> None:
        """Start them; `patience` is how many seconds each may take. What Kafka prints is left in the directory."""
        self._proxies, self._directory = proxies, directory
        # While one is down, no outgoing connection may get one of its ports: they come from a range of their own.
        PORT_RANGE.write_text("50000 59999")
        self.rabbitmq: RabbitmqServer | None = None
        if any(case.target in (Target.RABBITMQ, Target.STREAM) for case in cases):
            self.rabbitmq = RabbitmqServer(patience=patience)
        self.kafka: KafkaServer | None = None
        # A client of Kafka goes where the broker says that it is: so each case has a listener, which names its proxy.
        listeners = {case.name: free_port() for case in cases if case.target is Target.KAFKA}
        self._to_kafka = {name: proxies.add(f"{name}-target", port) for name, port in listeners.items()}
        if listeners:
            through = {port: self._to_kafka[name] for name, port in listeners.items()}
            self.kafka = KafkaServer(patience=patience, through=through, settings=[SESSION])
        PORT_RANGE.write_text("32768 49999")

    def prepare(self, case: Case) -> dict[str, str]:
        """Make what the case publishes to; return the keys of its target's Secret, empty where it has none."""
        if case.target is Target.KAFKA and self.kafka is not None:
            # The time of a record is when the broker had it: the worker's clock may say another one.
            self.kafka.create_topic(case.name, PARTITIONS, message_timestamp_type="LogAppendTime")
            return {"bootstrapServers": f"127.0.0.1:{self._to_kafka[case.name]}"}
        if self.rabbitmq is None or case.target not in (Target.RABBITMQ, Target.STREAM):
            return {}
        port, uri = self.rabbitmq.port, self.rabbitmq.uri
        with self.rabbitmq.client() as client:
            if case.target is Target.STREAM:
                port, uri = self.rabbitmq.stream_port, self.rabbitmq.stream_uri
                client.declare(case.name, arguments=STREAM)
            else:
                for queue in ("ledger", "tap"):
                    client.declare(f"{queue}-{case.name}", case.name)
        through = self._proxies.add(f"{case.name}-target", port)
        return {"uri": uri.replace(f":{port}/", f":{through}/")}

    def close(self) -> None:
        """Leave no files behind but what Kafka printed."""
        if self.kafka is not None:
            (self._directory / "kafka.log").write_text(self.kafka.console())
        for server in (self.rabbitmq, self.kafka):
            if server is not None:
                server.close()
