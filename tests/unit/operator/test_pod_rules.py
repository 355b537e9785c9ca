"""What a podTemplate may ask for: found with the field's path and what to do; everything not named is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from outbox_operator.api.pod_rules import EXECUTOR, OVERLAY, find_all_violations
from outbox_operator.api.resources import NotAllowedError, parse_processor
from outbox_operator.api.shapes import Scope
from outbox_operator.settings import read_settings
from tests.support.manifests import manifest
from tests.support.overlay_cases import cases
from tests.support.overlays import PLACE, asking, own, pod

META = {"namespace": "shop", "name": "orders", "uid": "u"}


@pytest.mark.parametrize(("spec", "violations"), cases())
def test_what_is_not_allowed_is_told_with_its_field_and_what_to_do(spec: dict[str, Any], violations: list[str]):
    before = copy.deepcopy(spec)
    assert sorted(find_all_violations(spec)) == sorted(violations)
    assert spec == before


def test_the_resource_is_refused_unless_anything_is_allowed():
    body = {**manifest("shop", asking(pod(hostPID=True))), "metadata": META}
    with pytest.raises(NotAllowedError) as refusal:
        parse_processor(body, "here")
    assert f"{PLACE}.spec.hostPID: is not allowed, remove it. " in str(refusal.value)
    assert "podTemplates.unrestricted=true" in str(refusal.value)
    lax = parse_processor(body, "here", unrestricted=True)
    assert lax.spec.worker.pod_template == pod(hostPID=True)


def test_an_own_container_is_own_by_its_name_alone():
    template = own(resources={})
    assert list(OVERLAY.violations(template, "spec.x", Scope("worker"))) == []
    assert list(OVERLAY.violations(template, "spec.x", Scope("driver"))) != []


@pytest.mark.parametrize(("value", "unrestricted"), [("true", True), ("false", False), ("", False)])
def test_the_switch_is_off_unless_it_is_set(value: str, *, unrestricted: bool):
    assert read_settings([], {"OUTBOX_UNRESTRICTED_POD_TEMPLATES": value}).unrestricted is unrestricted
    assert read_settings([], {}).unrestricted is False
    assert read_settings(["--unrestricted-pod-templates"], {}).unrestricted is True


CONTEXT: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
CONTAINER: dict[str, Any] = {
    "name": "executor",
    "image": "x",
    "ports": [{"containerPort": 7079}],
    "securityContext": CONTEXT,
}
EXECUTOR_SPEC: dict[str, Any] = {
    "automountServiceAccountToken": False,
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "serviceAccountName": "orders-driver",
    "containers": [CONTAINER],
    "volumes": [{"name": "db", "secret": {"secretName": "db"}}, {"name": "d", "persistentVolumeClaim": {}}],
}


@pytest.mark.parametrize(
    ("change", "violations"),
    [
        ({}, []),
        ({"nodeSelector": {"a": "b"}, "tolerations": []}, []),
        ({"hostPID": True}, ["pod.spec.hostPID: must be false"]),
        ({"automountServiceAccountToken": True}, ["pod.spec.automountServiceAccountToken: must be false"]),
        ({"volumes": [{"name": "h", "hostPath": {}}]}, ["pod.spec.volumes[h].hostPath: is not allowed, remove it"]),
        (
            {"volumes": [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {}}]}}]},
            ["pod.spec.volumes[t].projected.sources[].serviceAccountToken: is not allowed, remove it"],
        ),
        (
            {"containers": [{**CONTAINER, "livenessProbe": {"httpGet": {"host": "169.254.169.254", "port": 80}}}]},
            ["pod.spec.containers[executor].livenessProbe.httpGet.host: is not allowed, remove it"],
        ),
        (
            {"containers": [{**CONTAINER, "lifecycle": {"preStop": {"tcpSocket": {"host": "a", "port": 80}}}}]},
            ["pod.spec.containers[executor].lifecycle.preStop.tcpSocket.host: is not allowed, remove it"],
        ),
        ({"containers": [{**CONTAINER, "readinessProbe": {"exec": {}, "periodSeconds": 10}}]}, []),
        (
            {"containers": [{**CONTAINER, "ports": [{"containerPort": 80, "hostPort": 80}]}]},
            ["pod.spec.containers[executor].ports[].hostPort: must be 0"],
        ),
        (
            {"containers": [{**CONTAINER, "securityContext": {**CONTEXT, "privileged": True}}]},
            ["pod.spec.containers[executor].securityContext.privileged: must be false"],
        ),
        (
            {"securityContext": {"runAsNonRoot": True}},
            ["pod.spec.securityContext.seccompProfile: is missing, set seccompProfile: {type: RuntimeDefault}"],
        ),
    ],
)
def test_a_pod_of_a_spark_driver_is_restricted_and_has_no_token(change: dict[str, Any], violations: list[str]):
    body = {"metadata": {"name": "e"}, "spec": {**EXECUTOR_SPEC, **change}}
    assert list(EXECUTOR.violations(body, "pod", Scope())) == violations
