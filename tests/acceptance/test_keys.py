"""The installation's key, as two operators find or make it on a real API server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from outbox_operator.cluster.key_secrets import obtain_keys
from outbox_operator.cluster.kube import Kube
from outbox_operator.settings import read_settings
from tests.support.kubernetes.cluster import kubeconfig, namespaces

if TYPE_CHECKING:
    from tests.support.kubernetes.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.mark.parametrize("made", [True, False], ids=["as the chart makes it", "not there"])
async def test_operators_that_start_at_once_share_one_key(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *, made: bool
):
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig()))
    with namespaces(cluster, "keys") as (namespace,):
        settings = read_settings([], {"POD_NAMESPACE": namespace})
        for name in (settings.key_secret, settings.metrics_secret) if made else ():
            meta = {"name": name, "namespace": namespace}
            cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque"})
        async with Kube() as one, Kube() as two:
            found = await asyncio.gather(*(obtain_keys(kube, settings) for kube in (one, two) * 4))
            again = await obtain_keys(one, settings)
    assert len({keys.of("uid") for keys in (*found, again)}) == 1
    assert len({keys.metrics_hash for keys in (*found, again)}) == 1
    assert len(again.master) == 64
