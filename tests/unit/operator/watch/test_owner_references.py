"""Whose a pod or a job is: what made it, uid by uid, and nothing that a label says."""

from __future__ import annotations

import pytest

from outbox_operator.api.observed import Role
from outbox_operator.api.resources import KIND
from outbox_operator.watch.owner_references import is_own, may_be_of
from outbox_operator.watch.store import Body, slim
from tests.unit.operator.owned import (
    DEPLOYMENT,
    EVERYTHING,
    JOB,
    REPLICA_SET,
    RESOURCE,
    STATEFUL_SET,
    build_object,
    build_pod,
    reference_to,
    store_of,
)

OTHER = build_object(KIND, "billing")
OTHERS_SET = build_object("StatefulSet", "billing-driver", OTHER)

OWN = [
    pytest.param(build_pod("a", REPLICA_SET), id="of the Deployment's ReplicaSet"),
    pytest.param(build_pod("a", STATEFUL_SET, Role.DRIVER), id="of the StatefulSet"),
    pytest.param(build_pod("a", JOB, Role.CLAIM), id="of the Job"),
    pytest.param(JOB, id="the Job itself"),
]


@pytest.mark.parametrize("body", OWN)
def test_what_the_resources_workloads_made_is_its_own(body: Body):
    assert is_own(body, store_of(*EVERYTHING, body))


FOREIGN = [
    pytest.param(build_pod("a", None), id="a bare pod"),
    pytest.param(
        build_pod("a", None, ownerReferences=[reference_to(REPLICA_SET, uid="forged")]), id="a forged ReplicaSet"
    ),
    pytest.param(build_pod("a", None, ownerReferences=[reference_to(RESOURCE, uid="forged")]), id="a forged resource"),
    pytest.param(
        build_pod("a", None, ownerReferences=[reference_to(REPLICA_SET, name="another")]), id="a uid of another name"
    ),
    pytest.param(
        build_pod("a", None, ownerReferences=[reference_to(REPLICA_SET, kind="Job")]), id="a uid of another kind"
    ),
    pytest.param(
        build_pod("a", None, ownerReferences=[reference_to(REPLICA_SET, controller=False)]),
        id="an owner that is not its controller",
    ),
    pytest.param(build_pod("a", OTHERS_SET), id="another resource's pod with this one's label"),
    pytest.param(build_pod("a", build_object("ReplicaSet", "bare")), id="of a ReplicaSet that nothing owns"),
    pytest.param(build_object("Job", "orders-claim-0", None, Role.CLAIM), id="a bare Job"),
]


@pytest.mark.parametrize("body", FOREIGN)
def test_what_carries_the_labels_alone_is_not(body: Body):
    assert not is_own(body, store_of(*EVERYTHING, OTHER, OTHERS_SET, body))


def test_a_pod_of_another_namespace_is_not_of_this_ones_replica_set():
    elsewhere = build_pod("a", REPLICA_SET, namespace="elsewhere")
    assert not is_own(elsewhere, store_of(*EVERYTHING, elsewhere))


def test_a_pod_outlives_the_resource_that_was_made_again_under_its_name():
    pod = build_pod("a", REPLICA_SET)
    again = build_object(KIND, "orders", uid="another")
    assert not is_own(pod, store_of(again, DEPLOYMENT, REPLICA_SET, pod))


GOING = [
    pytest.param((RESOURCE, DEPLOYMENT, REPLICA_SET), id="all is there"),
    pytest.param((DEPLOYMENT, REPLICA_SET), id="the resource is gone"),
    pytest.param((REPLICA_SET,), id="the Deployment too"),
    pytest.param((), id="the ReplicaSet too"),
    pytest.param((build_object("Deployment", "orders-worker"), REPLICA_SET), id="a Deployment that was kept"),
]


@pytest.mark.parametrize("there", GOING)
def test_a_pod_may_be_of_a_resource_that_goes_with_what_made_it(there: tuple[Body, ...]):
    pod = build_pod("a", REPLICA_SET)
    assert may_be_of(pod, RESOURCE["metadata"]["uid"], store_of(*there, pod))


NOT_OF_IT = [
    pytest.param(build_pod("a", None), id="a bare pod"),
    pytest.param(build_pod("a", OTHERS_SET), id="another resource's"),
    pytest.param(build_pod("a", None, ownerReferences=[reference_to(RESOURCE, uid="forged")]), id="a forged resource"),
]


@pytest.mark.parametrize("pod", NOT_OF_IT)
def test_a_pod_that_was_made_for_another_or_by_nothing_is_not_of_it(pod: Body):
    assert not may_be_of(pod, RESOURCE["metadata"]["uid"], store_of(OTHER, OTHERS_SET, pod))


def test_a_pod_is_not_of_the_resource_that_had_the_name_before():
    pod = build_pod("a", REPLICA_SET)
    assert not may_be_of(pod, "former", store_of(RESOURCE, DEPLOYMENT, REPLICA_SET, pod))


def test_owners_that_own_each_other_end_the_look():
    one = build_object("ReplicaSet", "one")
    two = build_object("ReplicaSet", "two", one)
    one["metadata"]["ownerReferences"] = [reference_to(two)]
    pod = build_pod("a", one)
    assert not is_own(pod, store_of(*EVERYTHING, one, two, pod))


def test_of_a_replica_set_only_what_links_is_kept():
    full = REPLICA_SET | {"spec": {"replicas": 3}, "status": {"replicas": 3}}
    full["metadata"] = {**full["metadata"], "annotations": {"a": "b"}, "managedFields": [{"manager": "m"}]}
    assert slim(full) == REPLICA_SET
