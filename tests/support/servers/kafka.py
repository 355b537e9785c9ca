"""A real Kafka broker for a test session: one process that is controller and broker, on ports of its own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.admin._scram import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion
from confluent_kafka.cimpl import NewTopic

from tests.support.cache import find_cached, read_version
from tests.support.processes import freeze
from tests.support.servers.certificates import make_certificates
from tests.support.servers.postgres import free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from confluent_kafka import Message

LOOPBACK: Final = "localhost"
_PROPERTIES: Final = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},SASL_SSL://{address}:{tls_port},CONTROLLER://127.0.0.1:{controller_port}{bound}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},SASL_SSL://{host}:{tls_port}{advertised}
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT{protocols}
sasl.enabled.mechanisms=SCRAM-SHA-256,SCRAM-SHA-512
ssl.keystore.type=PEM
ssl.keystore.location={directory}/keystore.pem
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:tests
log.dirs={directory}/data
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=4000
broker.heartbeat.interval.ms=400
log.cleaner.dedupe.buffer.size=8388608
num.network.threads=2
num.io.threads=2
background.threads=1
num.recovery.threads.per.data.dir=1
"""
_LOGGING: Final = """
<Configuration status="WARN"><Appenders><Console name="out"><PatternLayout pattern="%d %p %c %m%n%throwable"/></Console>
</Appenders><Loggers><Root level="WARN"><AppenderRef ref="out"/></Root></Loggers></Configuration>
"""
_JAVA: Final = ["-Xms96m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]


class KafkaServer:
    """One broker. `stop` and `start` keep its data. User `tests` may do everything, with the password `s3cret word`."""

    user, password = "tests", "s3cret word"

    def __init__(
        self,
        *,
        patience: float = 180,
        java: Sequence[str] = _JAVA,
        host: str = LOOPBACK,
        through: Mapping[int, int] | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        """Start one.

        `patience` is how many seconds each start may take, `java` are options of its virtual machine, `host` is an
        address of this machine where others reach the listener with TLS. `through` are ports of more plain listeners,
        with those of the proxies that lead to them: a client is told to connect there.
        `settings` are more lines of its configuration, of which the last of a name counts.
        """
        self._patience, self._options, self._host = patience, java, host
        self._jars = find_cached("kafka", "kafka", read_version("KAFKA_VERSION"))
        self.directory = Path(tempfile.mkdtemp(prefix="outbox-kafka-", dir="/tmp"))
        self.port, self.tls_port, controller_port = free_port(), free_port(), free_port()
        address = "127.0.0.1" if host == LOOPBACK else host
        make_certificates(self.directory, f"DNS:localhost,IP:{address}")
        pem = "".join((self.directory / name).read_text() for name in ("server.key", "server.crt", "ca.crt"))
        (self.directory / "keystore.pem").write_text(pem)
        (self.directory / "log4j2.xml").write_text(_LOGGING)
        more = [(f"PROXY{number}", *ports) for number, ports in enumerate((through or {}).items())]
        properties = _PROPERTIES.format(
            port=self.port, tls_port=self.tls_port, controller_port=controller_port, directory=self.directory,
            host=host, address=address,
            bound="".join(f",{name}://127.0.0.1:{port}" for name, port, _ in more),
            advertised="".join(f",{name}://127.0.0.1:{proxy}" for name, _, proxy in more),
            protocols="".join(f",{name}:PLAINTEXT" for name, *_ in more),
        )  # fmt: skip
        self._properties = self.directory / "server.properties"
        # A password in single quotes would be one more layer of escaping: JAAS wants the module's name only.
        jaas = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        names = "".join(f"listener.name.sasl_ssl.{name}.sasl.jaas.config={jaas}\n" for name in _MECHANISMS)
        self._properties.write_text(properties + names + "".join(f"{line}\n" for line in settings))
        self._process: subprocess.Popen[bytes] | None = None
        identity = "MkU3OEVBNTcwNTJENDM2Qk"
        self._java("kafka.tools.StorageTool", "format", "-t", identity, "-c", str(self._properties)).wait(60)
        self.start()
        self.set_password(self.user, self.password)

    @property
    def version(self) -> str:
        return self._jars.name

    @property
    def pid(self) -> int:
        """Of the broker's process."""
        assert self._process is not None, "Kafka was stopped"
        return self._process.pid

    @property
    def servers(self) -> str:
        """The plain listener, which asks for no login."""
        return f"127.0.0.1:{self.port}"

    @property
    def tls_servers(self) -> str:
        """The listener with TLS and a login."""
        return f"{self._host}:{self.tls_port}"

    def files(self, directory: Path, **values: str) -> None:
        """Write the keys of a target's Secret; `ca_crt` is `ca.crt`."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in ({"bootstrapServers": self.servers} | values).items():
            (directory / name.replace("_", ".")).write_text(value)

    def secure_files(self, directory: Path, **values: str) -> None:
        """The same for the listener with TLS and a login, as user `tests`."""
        self.files(directory, **(self.secure_secret | values))

    @property
    def secure_secret(self) -> dict[str, str]:
        """The keys of a target's Secret for that listener."""
        return {
            "bootstrapServers": self.tls_servers,
            "username": self.user,
            "password": self.password,
            "saslMechanism": "SCRAM-SHA-512",
            "ca.crt": (self.directory / "ca.crt").read_text(),
        }

    def start(self) -> None:
        """Start the broker and wait until a client gets an answer."""
        process = self._process = self._java("kafka.Kafka", str(self._properties))

        def answers() -> bool:
            assert process.poll() is None, self.console()
            with contextlib.suppress(KafkaException):
                return bool(self.admin().list_topics(timeout=1).brokers)
            return False

        wait_until(answers, "Kafka answers", seconds=self._patience)

    def stop(self) -> None:
        """Stop the broker as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It takes connections and requests, and answers none."""
        assert self._process is not None
        freeze(self._process.pid)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def console(self) -> str:
        return (self.directory / "console").read_text(errors="replace")

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.servers, "log_level": 0})

    def set_password(self, user: str, password: str) -> None:
        """Create a user, or give it another password."""
        admin = self.admin()
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            change = UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), password.encode())
            _await_all(admin.alter_user_scram_credentials([change]))

    def allow(self, user: str, kind: str = "TOPIC", name: str = "*", *operations: str) -> None:
        """Allow a user operations on what has a name, or with `*` as its end a prefix; absent: Write on every topic."""
        prefix = name.endswith("*") and name != "*"
        pattern = ResourcePatternType.PREFIXED if prefix else ResourcePatternType.LITERAL
        place = (ResourceType[kind], name.rstrip("*") if prefix else name, pattern)
        rules = [
            AclBinding(*place, f"User:{user}", "*", AclOperation[each], AclPermissionType.ALLOW)
            for each in operations or ("WRITE",)
        ]
        admin = self.admin()
        _await_all(admin.create_acls(rules))

    def create_topic(self, name: str, partitions: int = 3, **settings: str) -> str:
        """Create a topic; a setting's dots are written as underscores."""
        config = {key.replace("_", "."): value for key, value in settings.items()}
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
        admin = self.admin()
        _await_all(admin.create_topics([topic]))
        return name

    def topic_setting(self, name: str, setting: str) -> str:
        """What a topic is set to."""
        resource, admin = ConfigResource(ResourceType.TOPIC, name), self.admin()
        (found,) = admin.describe_configs([resource]).values()
        return str(found.result(30)[setting].value)

    def set_topic(self, name: str, setting: str, value: str) -> None:
        """Set a topic to something else."""
        change = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
        admin = self.admin()
        _await_all(
            admin.incremental_alter_configs([ConfigResource(ResourceType.TOPIC, name, incremental_configs=[change])])
        )

    def delete_topic(self, name: str) -> None:
        admin = self.admin()
        _await_all(admin.delete_topics([name]))

    def delete_records(self, name: str, before: int) -> None:
        """Delete what a topic has in its first partition before an offset, as its age would."""
        admin = self.admin()
        _await_all(admin.delete_records([TopicPartition(name, 0, before)]))

    @contextlib.contextmanager
    def topic(self, partitions: int = 3, **settings: str) -> Iterator[Topic]:
        """A topic of one test."""
        name = f"orders-{uuid.uuid4().hex[:8]}"
        self.create_topic(name, partitions, **settings)
        with contextlib.closing(Topic(self, name)) as made:
            yield made
        self.delete_topic(name)

    def _java(self, *arguments: str) -> subprocess.Popen[bytes]:
        logging = f"-Dlog4j2.configurationFile={self.directory / 'log4j2.xml'}"
        with (self.directory / "console").open("ab") as console:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", "java", *self._options, logging, "-cp", f"{self._jars}/*", *arguments],
                stdout=console,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
            )


def _await_all(answers: dict[Any, Future[Any]]) -> None:
    """Its caller holds the client: an answer is lost with it."""
    for each in answers.values():
        each.result(120)


_MECHANISMS: Final = ("scram-sha-256", "scram-sha-512")


class Topic:
    """What a reader of a topic sees: all messages of all partitions, from the beginning."""

    def __init__(self, server: KafkaServer, name: str, *, isolation: str = "read_committed") -> None:
        self._server, self.name, self._isolation = server, name, isolation
        self._seen: list[Message] = []
        self._consumer: Consumer | None = None
        self._places: dict[int, int] = {}

    def read(self) -> Sequence[Message]:
        """All that is there now; the messages of one partition in their order."""
        if self._consumer is None:
            settings = {"bootstrap.servers": self._server.servers, "group.id": self.name, "log_level": 0}
            settings |= {"isolation.level": self._isolation, "enable.partition.eof": True}
            self._consumer = Consumer(settings | {"enable.auto.commit": False})
            found = self._consumer.list_topics(self.name, timeout=10).topics[self.name].partitions
            self._consumer.assign([TopicPartition(self.name, number, OFFSET_BEGINNING) for number in found])
            self._places = dict.fromkeys(found, 0)
        ends = {number: self._end(self._consumer, number) for number in self._places}
        until = time.monotonic() + 30
        while any(self._places[number] < end for number, end in ends.items()):
            assert time.monotonic() < until, f"read up to {self._places} of {ends} in 30 s"
            for each in self._consumer.consume(10_000, timeout=0.2):
                number, offset, error = each.partition(), each.offset(), each.error()
                assert number is not None
                assert offset is not None
                if error is None:
                    self._seen.append(each)
                    self._places[number] = offset + 1
                elif error.code() == KafkaError._PARTITION_EOF:  # it is behind records that no consumer sees
                    self._places[number] = offset
        return self._seen

    def _end(self, consumer: Consumer, number: int) -> int:
        found = consumer.get_watermark_offsets(TopicPartition(self.name, number), timeout=10)
        assert found is not None
        return int(found[1])

    def ids(self) -> list[str]:
        """The ids of the outbox's messages, as `read` orders them."""
        return [headers(each)["x-outbox-message-id"] for each in self.read()]

    def wait_for(self, count: int, seconds: float = 30.0) -> list[str]:
        """Wait until so many messages are there; return the ids."""
        wait_until(lambda: len(self.read()) >= count, f"{count} messages in {self.name}", seconds)
        return self.ids()

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


def headers(message: Message) -> dict[str, str]:
    """The headers of a message as text."""
    found = cast("list[tuple[str, bytes]]", message.headers() or [])
    return {name: value.decode() for name, value in found}
