"""A process that cannot use its configuration says why where the kubelet keeps it: a person sees no other words."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from outbox_core.report import ExitCode

FINE = {
    "resource": {"cluster": "c", "namespace": "n", "name": "orders", "uid": "u"},
    "generation": 1,
    "processorId": "orders",
    "source": {"connection": {"secretRef": {"name": "db"}}},
    "target": {"log": {}},
}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        pytest.param(
            FINE | {"target": {"later": {}}}, "target.later: this version has no such field", id="a newer target"
        ),
        pytest.param(
            FINE | {"delivery": {"guarantee": "Transactional"}},
            "Transactional needs a target in the source's database",
            id="a guarantee that its target cannot give",
        ),
    ],
)
def test_it_ends_with_12_and_a_sentence(tmp_path, config, says):
    (tmp_path / "processor.json").write_text(json.dumps(config))
    word = tmp_path / "termination-log"
    word.touch()
    arguments = ["--config", str(tmp_path / "processor.json"), "--termination-log", str(word), "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "outbox_worker", *arguments], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == ExitCode.INVALID_CONFIGURATION, done.stderr
    assert says in word.read_text()
