"""The HTTP contract, asked over a real socket."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from outbox_core.config import ProcessorConfig
from outbox_core.errors import ConfigurationError
from outbox_core.processor.state import initial_state
from outbox_core.report import BlockedKey, FailureSummary, Intent, LeaseView, PartitioningView, Report, Unfinished
from outbox_worker.observe.health import Access, HealthServer
from outbox_worker.observe.status import Identity, ProcessStatus, Progress
from outbox_worker.observe.telemetry import render

CONFIG = ProcessorConfig.model_validate(
    {
        "resource": {"cluster": "c", "namespace": "n", "name": "o", "uid": "u"},
        "generation": 1,
        "processorId": "orders",
        "source": {"connection": {"secretRef": {"name": "db"}}},
        "target": {"log": {}},
    }
)


OPEN = Access(key=b"", pod_uid="uid", metrics_hash="")
"""Only this machine may ask."""


def build_shared(name):
    """Status of one of several processors, of a resource of its name."""
    resource = CONFIG.resource.model_copy(update={"name": name})
    config = CONFIG.model_copy(update={"processor_id": name, "resource": resource})
    return ProcessStatus(config, Identity("pod", "uid", "instance"), initial_state(0.0), is_shared=True)


class Served:
    """A process status, its server, and a client."""

    def __init__(self, host=""):
        self.status = ProcessStatus(CONFIG, Identity("pod", "uid", "instance"), initial_state(0.0))
        self.progress = Progress()
        self.status.add_seconds(0.1, stored=True)
        self.server = HealthServer((host, 0), access=OPEN, statuses=[self.status], progress=self.progress)
        self.server.start()

    def ask(self, path, body=None, host="127.0.0.1"):
        url = f"http://{host}:{self.server.port}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as err:
            with err:
                return err.code, err.read().decode()


@pytest.fixture
def served():
    running = Served()
    yield running
    running.server.close()


def test_status_is_the_report(served):
    code, text = served.ask("/status")
    assert code == 200
    assert Report.model_validate_json(text).pod == "pod"
    assert json.loads(text)["processorId"] == "orders"


def test_alive_while_the_threads_move(served):
    assert served.ask("/livez")[0] == 200
    served.progress.expect("loop", within=-1)
    assert served.ask("/livez") == (503, "no progress: loop\n")


def test_starting_is_not_ready(served):
    assert served.ask("/readyz") == (503, "Starting: Starting\n")


@pytest.mark.parametrize("intent", list(Intent))
def test_an_intent_is_remembered(served, intent):
    assert served.ask("/intent", json.dumps({"intent": intent.value}).encode())[0] == 200
    assert served.status.intent is intent


def test_of_several_processors_an_intent_is_for_those_that_it_names():
    """A claim of which nothing was said is vacated: its resource may be gone."""
    bills, mails = (build_shared(name) for name in ("bills", "mails"))
    server = HealthServer(("127.0.0.1", 0), access=OPEN, statuses=[bills, mails], progress=Progress())
    server.start()
    try:
        assert server.post("/intent", b'{"intent": "KeepClaim", "resources": ["mails", "gone"]}')[0] == 200
        assert (bills.intent, mails.intent) == (None, Intent.KEEP_CLAIM)
        assert server.post("/intent", b'{"intent": "ReleaseClaim", "resources": 7}')[0] == 400
        assert server.post("/intent", b'{"intent": "ReleaseClaim"}')[0] == 200
        assert {bills.intent, mails.intent} == {Intent.RELEASE_CLAIM}
    finally:
        server.close()


@pytest.mark.parametrize("body", [b"{}", b"not json", b'{"intent": "Explode"}', b"[]", b"x" * 5000])
def test_anything_else_is_refused(served, body):
    assert served.ask("/intent", body)[0] == 400
    assert served.status.intent is None


def test_metrics_are_there_and_other_paths_are_not(served):
    code, text = served.ask("/metrics")
    assert code == 200
    of = f'processor="{CONFIG.processor_id}"'
    for name, outcome, value in (("count", "stored", 1.0), ("sum", "stored", 0.1), ("count", "failed", 0.0)):
        assert f'outbox_batch_seconds_{name}{{outcome="{outcome}",{of}}} {value}' in text
    for bound, count in (("0.05", 0), ("0.1", 1), ("0.25", 1), ("300.0", 1), ("+Inf", 1)):
        assert f'outbox_batch_seconds_bucket{{le="{bound}",outcome="stored",{of}}} {count}.0' in text
    assert served.ask("/secrets")[0] == 404
    assert served.ask("/elsewhere", b"{}")[0] == 404


def test_what_status_says_of_the_modes_is_in_the_metrics(served):
    key = BlockedKey(key="7", message_id="m", attempts=1)
    served.status.set_observed(
        leases=[LeaseView(partition=0, epoch=4, pod="pod", held=True), LeaseView(partition=1, epoch=9, pod="other")],
        partitioning=PartitioningView(count=2, next_count=4, at_barrier=1),
        failures=FailureSummary(held=3, dead_letters=2, blocked_keys=[key]),
        unfinished=Unfinished(consumers=3),
    )
    text = served.ask("/metrics")[1]
    for line in (
        'outbox_partition_owned{partition="0",processor="orders"} 1.0',
        'outbox_partition_owned{partition="1",processor="orders"} 0.0',
        'outbox_partition_epoch{partition="1",processor="orders"} 9.0',
        'outbox_partitions{processor="orders"} 2.0',
        'outbox_partitions_next{processor="orders"} 4.0',
        'outbox_partitions_at_barrier{processor="orders"} 1.0',
        'outbox_blocked_keys{processor="orders"} 1.0',
        'outbox_consumers{processor="orders"} 3.0',
        'outbox_state_reason{processor="orders",reason="Starting",state="Starting"} 1.0',
    ):
        assert line in text


def test_metrics_of_a_shared_process_name_the_resource_of_each():
    """Alerts and the dashboard look for the name that the operator's own series have."""
    text = render([build_shared(name) for name in ("bills", "mails")]).decode()
    assert text.count("# TYPE outbox_state gauge") == 1
    for name in ("bills", "mails"):
        assert f'outbox_state{{processor="{name}",resource="{name}",state="Starting"}} 1.0' in text
        assert f'outbox_batch_seconds_count{{outcome="stored",processor="{name}",resource="{name}"}} 0.0' in text


def test_no_figure_of_failures_is_told_before_the_database_was_looked_at(served):
    """A 0 that is not known would be a fall, and what is known later new dead letters (OutboxDeadLettersGrow)."""
    names = ("outbox_held_messages", "outbox_dead_letters", "outbox_blocked_keys")
    text = served.ask("/metrics")[1]
    assert [name for name in names if name in text] == []
    served.status.set_observed(failures=FailureSummary())
    text = served.ask("/metrics")[1]
    assert [name for name in names if f'{name}{{processor="orders"}} 0.0' in text] == [*names]


def test_a_port_that_is_taken_is_said(served):
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        HealthServer(("", served.server.port), access=OPEN, statuses=[served.status], progress=served.progress)


@pytest.mark.parametrize(
    ("host", "asked", "reached"),
    [("", "127.0.0.2", True), ("127.0.0.1", "127.0.0.1", True), ("127.0.0.1", "127.0.0.2", False)],
)
def test_it_answers_at_the_address_that_was_named_or_at_each(host, asked, reached):
    served = Served(host)
    try:
        answer = served.ask("/livez", host=asked)
    except urllib.error.URLError:
        answer = None
    finally:
        served.server.close()
    assert answer == ((200, "alive\n") if reached else None)


def test_an_address_of_another_machine_is_said(served):
    with pytest.raises(ConfigurationError, match=r"port 0 of 192\.0\.2\.1 for status cannot be opened"):
        Served("192.0.2.1")
