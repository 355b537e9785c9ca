"""Command line, environment and the operator's file."""

from __future__ import annotations

import json

import pytest

from outbox_core.errors import ConfigurationError
from outbox_core.processor.state import initial_state
from outbox_worker.observe.status import Identity, ProcessStatus
from outbox_worker.settings import Act, read_config, read_settings
from outbox_worker.targets import build_target

CONFIG = {
    "resource": {"cluster": "prod", "namespace": "shop", "name": "orders", "uid": "uid-1"},
    "generation": 3,
    "processorId": "orders",
    "source": {"connection": {"secretRef": {"name": "db"}}},
    "target": {"log": {}},
    "sweepUids": ["gone"],
}


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "processor.json"
    path.write_text(json.dumps(CONFIG))
    return path


def settings(path, *arguments, **environment):
    return read_settings(["--config", str(path), *arguments], environment)


def test_the_environment_says_which_pod_this_is(config_file):
    read = settings(config_file, "--try-claim", POD_NAME="pod-1", POD_UID="u", OUTBOX_GRACE_SECONDS="7.5")
    assert (read.pod, read.pod_uid, read.grace_seconds, read.act) == ("pod-1", "u", 7.5, Act.TRY_CLAIM)
    bare = settings(config_file, OUTBOX_GRACE_SECONDS="soon")
    assert bare.pod
    assert bare.pod_uid
    assert bare.grace_seconds == 30.0


def test_a_log_level_that_is_none_is_refused_with_those_there_are(config_file, capsys):
    assert settings(config_file, OUTBOX_LOG_LEVEL="debug").log_level == "DEBUG"
    with pytest.raises(SystemExit):
        settings(config_file, OUTBOX_LOG_LEVEL="loud")
    assert "OUTBOX_LOG_LEVEL is LOUD: it can be CRITICAL, " in capsys.readouterr().err


def test_another_cluster_id_is_another_resource_always_the_same(config_file):
    first = read_config(settings(config_file, "--cluster-id", "laptop"))
    again = read_config(settings(config_file, "--cluster-id", "laptop"))
    assert str(first.resource) == "laptop/shop/orders"
    assert first.resource.uid == again.resource.uid != "uid-1"
    assert first.sweep_uids == []
    same = read_config(settings(config_file, "--cluster-id", "prod"))
    assert (same.resource.uid, same.sweep_uids) == ("uid-1", ["gone"])


def test_fields_of_a_newer_operator_are_ignored_and_named(config_file, caplog):
    later = {"laterField": 1, "delivery": {"batchSize": 7, "later": {"a": 1}}}
    config_file.write_text(json.dumps(CONFIG | later))
    config = read_config(settings(config_file))
    assert config.delivery.batch_size == 7
    assert config.ignored == ("delivery.later", "laterField")
    assert "ignored" not in config.model_dump()
    assert caplog.records[-1].fields == "delivery.later, laterField"
    status = ProcessStatus(config, Identity("pod", "uid", "instance"), initial_state(0.0))
    status.advice = "build the index"
    assert status.report().advice == (
        "build the index; the pods' image does not know delivery.later, laterField and ignores it: "
        "use the operator's own image"
    )


def test_a_wrong_file_is_named_with_its_field(config_file, tmp_path):
    config_file.write_text(json.dumps(CONFIG | {"delivery": {"batchSize": 0}}))
    with pytest.raises(ConfigurationError, match=r"delivery\.batchSize"):
        read_config(settings(config_file))
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_config(settings(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"delivery": {"guarantee": "Transactional"}}, "needs a target in the source's database"),
     ({"target": {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": "orders"}},
       "delivery": {"guarantee": "Transactional", "mode": "Competing", "competing": {}}}, "Ordered or Partitioned"),
     ({"target": {"parquet": {"path": "/data"}}, "delivery": {"guarantee": "AtLeastOnce"}}, "has no other")],
)  # fmt: skip
def test_a_target_that_cannot_be_is_refused(config_file, change, message):
    config_file.write_text(json.dumps(CONFIG | change))
    read = settings(config_file)
    with pytest.raises(ConfigurationError, match=message):
        build_target(read_config(read), read)


def test_the_port_comes_from_the_environment_too(config_file, capsys):
    assert settings(config_file, OUTBOX_STATUS_PORT="9090").port == 9090
    assert settings(config_file, "--port", "9091", OUTBOX_STATUS_PORT="9090").port == 9091
    with pytest.raises(SystemExit):
        settings(config_file, OUTBOX_STATUS_PORT="soon")
    assert "--port: 'soon' is not a whole number" in capsys.readouterr().err
