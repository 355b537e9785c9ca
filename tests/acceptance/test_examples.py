"""Every example is taken by the API server as it stands, by a server-side dry run."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.chart.chart import tool
from tests.support.kubernetes.cluster import ROOT, kubeconfig, namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes.cluster import Cluster

pytestmark = pytest.mark.cluster

EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if "OutboxProcessor" in path.read_text())
OURS = [path for path in EXAMPLES if "argocd" not in path.parts and path.name != "keda.yaml"]
"""The kinds of Argo CD and KEDA are not installed here."""


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    with namespaces(cluster, "examples") as (name,):
        yield name


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_the_api_server_takes_an_example_without_a_word(namespace: str, path: Path) -> None:
    command = [str(tool("kubectl")), "--kubeconfig", str(kubeconfig()), "apply", "--server-side", "--dry-run=server"]
    done = subprocess.run([*command, "-n", namespace, "-f", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "serverside-applied (server dry run)" in done.stdout
    assert done.stderr == "", "no warning"
