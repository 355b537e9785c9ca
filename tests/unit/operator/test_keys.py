"""The key of a resource: derived, mounted where it is needed, and written nowhere else."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from outbox_core.config import KEY_PATH
from outbox_operator.api.keys import Keys
from outbox_operator.api.observed import Role
from outbox_operator.rendering.manifests import (
    build_job,
    build_key,
    build_owned,
    build_release,
    build_workload,
)
from outbox_operator.rendering.pods import KEY_VOLUME
from outbox_operator.settings import Images
from tests.unit.operator.building import UID, build_processor, template_hash
from tests.unit.operator.test_manifests import PROCESSORS

KEYS = Keys(b"installation", metrics_hash="5e884898")
IMAGES = Images(keys=KEYS)


def test_a_key_is_one_resources_and_one_installations():
    assert KEYS.of(UID) == Keys(b"installation").of(UID)
    assert len({KEYS.of(UID), KEYS.of("another"), Keys(b"another").of(UID)}) == 3
    assert len(KEYS.of(UID)) == 64


def test_another_key_has_a_secret_of_another_name():
    names = {
        KEYS.secret_name("orders", UID),
        KEYS.secret_name("orders", "made again"),
        Keys(b"x").secret_name("orders", UID),
    }
    assert len(names) == 3
    assert len(KEYS.secret_name("a" * 63, UID)) <= 63


def test_no_text_of_them_shows_a_key():
    assert "installation" not in repr(IMAGES)
    assert KEYS.of(UID).decode() not in repr(KEYS)


def test_the_secret_goes_with_the_resource_and_cannot_be_changed():
    secret = build_key(build_processor(), KEYS)
    assert base64.b64decode(secret["data"][KEY_PATH.name]) == KEYS.of(UID)
    assert secret["immutable"] is True
    assert secret["metadata"]["name"] == KEYS.secret_name("orders", UID)
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (UID, True)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_pods_that_answer_have_the_key_and_no_other_pod_has(processor: Any):
    template = build_workload(processor, IMAGES, 1)["spec"]["template"]["spec"]
    (volume,) = [each for each in template["volumes"] if each["name"] == KEY_VOLUME]
    assert volume["secret"] == {"secretName": KEYS.secret_name("orders", UID), "defaultMode": 0o440}
    (container,) = template["containers"]
    assert {"name": KEY_VOLUME, "mountPath": "/etc/outbox/key", "readOnly": True} in container["volumeMounts"]
    assert {"name": "OUTBOX_METRICS_TOKEN_SHA256", "value": "5e884898"} in container["env"]
    others = [build_job(processor, IMAGES, "try", Role.CLAIM), build_release(processor, IMAGES)]
    others += [each for each in build_owned(processor, IMAGES, 1, None, ()) if each["kind"] == "ConfigMap"]
    assert KEY_VOLUME not in json.dumps(others)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_no_object_but_the_secret_has_the_key(processor: Any):
    text = json.dumps(build_owned(processor, IMAGES, 1, None, ()))
    assert KEYS.of(UID).decode() not in text
    assert base64.b64encode(KEYS.of(UID)).decode() not in text


@pytest.mark.parametrize(
    "other", [replace(KEYS, master=b"changed"), replace(KEYS, metrics_hash="changed")], ids=["key", "token"]
)
def test_another_key_or_token_replaces_the_pods(other: Keys):
    assert template_hash(build_processor(), Images(keys=other)) != template_hash(build_processor(), IMAGES)
