"""Which answers of the API server blame the object, and which pass by themselves; the words are API servers' own."""

from __future__ import annotations

import pytest

from outbox_operator.cluster.kube import KubeError

TYPED = "failed to create typed patch object (shop/orders; apps/v1, Kind=Deployment): .spec.template.spec"
WEBHOOK = 'admission webhook "images.example.com" denied the request: no such registry'
POLICY = "ValidatingAdmissionPolicy 'root' with binding 'all' denied request: failed expression: !object.hostPID"

REFUSED = [
    pytest.param(500, "", f"{TYPED}.nodeSelektor: field not declared in schema", id="a field that is none"),
    pytest.param(500, "", f"{TYPED}.containers: expected list, got &{{map[]}}", id="an object for a list"),
    pytest.param(
        500,
        "",
        "failed to convert new typed object (shop/orders; apps/v1, Kind=Deployment) to object: quantities must match",
        id="a quantity that is none",
    ),
    pytest.param(
        400, "BadRequest", f"{TYPED}.nodeSelektor: field not declared in schema", id="the same, as it will be"
    ),
    pytest.param(422, "Invalid", 'Deployment.apps "orders" is invalid: spec.template.spec.volumes', id="invalid"),
    pytest.param(403, "Forbidden", 'deployments.apps "orders" is forbidden: exceeded quota: few', id="a quota"),
    pytest.param(403, "Forbidden", 'deployments.apps "orders" is forbidden: User "op" cannot patch', id="no right"),
    pytest.param(413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728", id="too large"),
    pytest.param(400, "BadRequest", WEBHOOK, id="a webhook"),
    pytest.param(500, "InternalError", WEBHOOK, id="a webhook that chose 500"),
    pytest.param(401, "Unauthorized", POLICY, id="a policy that chose 401"),
    pytest.param(409, "Conflict", WEBHOOK, id="a webhook that chose 409"),
    pytest.param(
        500,
        "InternalError",
        'Internal error occurred: failed calling webhook "images.example.com": connection refused',
        id="a webhook that is away",
    ),
]

PASSING = [
    pytest.param(0, "Unreachable", "ClientConnectorError: cannot connect", id="no API server"),
    pytest.param(500, "InternalError", "Internal error occurred: etcdserver: leader changed", id="etcd has no leader"),
    pytest.param(500, "", "etcdserver: request timed out", id="etcd is slow"),
    pytest.param(503, "ServiceUnavailable", "apiserver is shutting down", id="it is being restarted"),
    pytest.param(504, "Timeout", "Timeout: request did not complete within requested timeout", id="it is slow"),
    pytest.param(429, "TooManyRequests", "too many requests, please try again later", id="it is busy"),
    pytest.param(409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "few"', id="changed meanwhile"),
    pytest.param(401, "Unauthorized", "Unauthorized", id="a token is being renewed"),
]


@pytest.mark.parametrize(("status", "reason", "message"), REFUSED)
def test_the_object_is_refused(status: int, reason: str, message: str):
    assert KubeError(status, reason, message).refused


@pytest.mark.parametrize(("status", "reason", "message"), PASSING)
def test_it_passes_by_itself(status: int, reason: str, message: str):
    assert not KubeError(status, reason, message).refused
