"""Reads the installation's key and the token for workers' metrics from the operator's own namespace.

The chart makes both Secrets empty, so that what it renders never changes; the first leader fills them.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import TYPE_CHECKING, Final

from outbox_operator.api.keys import Keys
from outbox_operator.api.naming import build_object
from outbox_operator.cluster.kube import Kube, KubeError, Where

if TYPE_CHECKING:
    from outbox_operator.settings import Settings

KEY_FIELD: Final = "key"
TOKEN_FIELD: Final = "token"  # noqa: S105 - the field's name
TRIES: Final = 5
"""Another process may fill it in the same moment; then that one's is read."""


async def obtain_keys(kube: Kube, settings: Settings) -> Keys:
    """Read the installation's key and token; make what is not there yet.

    Raises:
        KubeError: the API server cannot be asked, or refuses.

    """
    master = await _obtain(kube, Where("Secret", settings.lease_namespace, settings.key_secret), KEY_FIELD)
    token = await _obtain(kube, Where("Secret", settings.lease_namespace, settings.metrics_secret), TOKEN_FIELD)
    return Keys(master, hashlib.sha256(token).hexdigest())


async def _obtain(kube: Kube, place: Where, field: str) -> bytes:
    for _ in range(TRIES):
        found = await kube.get(place)
        data = (found or {}).get("data") or {}
        if value := base64.b64decode(data.get(field, "")).strip():
            return value
        made = {**data, field: base64.b64encode(secrets.token_hex(32).encode()).decode()}
        try:
            if found is None:
                meta = {"namespace": place.namespace, "name": place.name}
                await kube.create(build_object(place.kind, meta, data=made))
            else:
                await kube.replace({**found, "data": made})
        except KubeError as err:
            if err.status == 403 and found is None:
                remedy = f"Secret {place.namespace}/{place.name} is gone: helm upgrade makes it again, empty"
                raise KubeError(err.status, err.reason, f"{remedy} ({err.message})") from err
            if err.status != 409:
                raise
    raise KubeError(409, "Conflict", f"Secret {place.namespace}/{place.name} was changed by others {TRIES} times")
