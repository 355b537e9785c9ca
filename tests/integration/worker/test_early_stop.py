"""A pod that is told to stop while its process still imports: the worker's, the Spark driver's, the operator's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.postgres import wait_until


@pytest.mark.parametrize(
    ("package", "imported"), [("outbox_worker", "psycopg"), ("outbox_spark", "psycopg"), ("outbox_operator", "kopf")]
)
def test_as_process_1_of_a_container_it_ends_at_once_and_not_as_if_it_had_done_its_work(package, imported, tmp_path):
    reached = tmp_path / "reached"
    (tmp_path / f"{imported}.py").write_text(
        f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep(300)\n"
    )
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", package]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}) as container:
        try:
            wait_until(reached.exists, "it imports", 60.0)
            (process,) = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
            os.kill(int(process), signal.SIGTERM)
            assert container.wait(20.0) == 128 + signal.SIGTERM
        finally:
            container.kill()
