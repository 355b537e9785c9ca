"""The only module that talks to the Kubernetes API; its errors become `KubeError` here and nowhere else.

Plain JSON over aiohttp: objects stay dictionaries, and server-side apply is one PATCH. The client library only finds
the server and the credentials (kubeconfig with its plugins, or the pod's token, which rotates).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import ssl
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import aiohttp
from kubernetes import client, config

from outbox_operator.api.naming import RESOURCES
from outbox_operator.cluster.drift import FIELD_MANAGER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

PARALLEL_CALLS: Final = 24
PAGE: Final = 250
TIMEOUT: Final = aiohttp.ClientTimeout(total=20, connect=5)

_METADATA: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.:]{0,251}[a-z0-9])?")
"""A DNS subdomain, with the colons of RBAC objects: never a path."""

_PASSING: Final = frozenset({401, 408, 409, 429})
"""Of the statuses that blame the caller those that say nothing against the object."""

_REFUSAL: Final = re.compile(
    r"^failed to (create typed|convert) "  # a field that the schema has not, a value of another type
    r"|denied (the )?request"  # an admission webhook or policy, which chooses its own status
    r"|failed calling webhook"
)
"""What refusals say that have another status.

Server-side apply answers a manifest that does not fit its schema with 500, with `fieldValidation=Strict` too, which
only looks for keys that are there twice (kubernetes/kubernetes#122480, #139253).
"""

log = logging.getLogger(__name__)


class KubeError(Exception):
    """The API server refused a call, or could not be asked (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def refused(self) -> bool:
        """The object did not pass: it is wrong, or forbidden, or admission is in the way; the message is for people.

        Everything else passes by itself: an API server that is away or busy, credentials that are being renewed, an
        object that changed meanwhile.
        """
        if 400 <= self.status < 500 and self.status not in _PASSING:
            return True
        return self.status > 0 and _REFUSAL.search(self.message) is not None


class Where(NamedTuple):
    """An object's place."""

    kind: str
    namespace: str
    name: str = ""

    def path(self, subresource: str = "") -> str:
        """Write the URL path.

        Raises:
            KubeError: namespace or name is none: what a pod says must not lead to another object.

        """
        for part in (self.namespace, self.name):
            if part and not _NAME.fullmatch(part):
                raise KubeError(0, "InvalidName", f"{part[:60]!r} is no name of a Kubernetes object")
        group, version, plural = RESOURCES[self.kind]
        prefix = f"apis/{group}/{version}" if group else f"api/{version}"
        place = f"{prefix}/namespaces/{self.namespace}" if self.namespace else prefix
        return "/".join(part for part in (place, plural, self.name, subresource) if part)


def where(manifest: Mapping[str, Any]) -> Where:
    """Say where a manifest belongs."""
    return Where(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])


def version_of(body: Mapping[str, Any]) -> int:
    """Read the resourceVersion of an object or a list as a number.

    Those of one kind, of its objects and of its lists, are integers that grow with every change: the API says so since
    Kubernetes 1.35 (KEP-5504), and API servers have done so before. Those of two kinds are never compared.
    """
    text = body["metadata"].get("resourceVersion", "0")
    return int(text) if text.isdecimal() else 0


class Kube:
    """A session with the API server; use as an async context manager."""

    def __init__(self) -> None:
        """Find server and credentials.

        Raises:
            kubernetes.config.ConfigException: neither a kubeconfig nor a pod's token is there.

        """
        self._configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=self._configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=self._configuration)  # type: ignore[no-untyped-call]
        self._slots = asyncio.Semaphore(PARALLEL_CALLS)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        context = ssl.create_default_context(cafile=self._configuration.ssl_ca_cert)
        if not self._configuration.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self._configuration.cert_file:
            context.load_cert_chain(self._configuration.cert_file, self._configuration.key_file)
        connector = aiohttp.TCPConnector(ssl=context, limit=PARALLEL_CALLS)
        self._session = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        content: str = "application/json",
        params: Mapping[str, str] | None = None,
        accept: str = "application/json",
        with_owners: bool = True,
    ) -> dict[str, Any]:
        """Make one call; `with_owners` False: leave out who set which field, the greater part of most objects.

        Raises:
            KubeError: it was refused, or the server cannot be reached.

        """
        if self._session is None:
            raise KubeError(0, "Closed", "the session is not open")
        headers = {"Content-Type": content, "Accept": accept}
        data = None if body is None else json.dumps(body)
        url = f"{self._configuration.host}/{path}"
        try:
            # Asked for each call: the hook behind it reads a rotated token again.
            token = self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
            if token:
                headers["Authorization"] = token
            async with (
                self._slots,
                self._session.request(method, url, data=data, headers=headers, params=params) as answer,
            ):
                text = await answer.text()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError, config.ConfigException) as err:
            raise KubeError(0, "Unreachable", f"{type(err).__name__}: {err}") from err
        parsed = _parse(text, None if with_owners else _without_owners)
        if status >= 400:
            raise KubeError(status, str(parsed.get("reason", "")), str(parsed.get("message", text[:500])))
        return parsed

    async def get(self, place: Where) -> dict[str, Any] | None:
        """Fetch an object; None when it is not there."""
        return await _none_if((404,), self.call("GET", place.path()))

    async def list(
        self,
        kind: str,
        namespace: str,
        *,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
        from_memory: bool = False,
        keep: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> tuple[list[dict[str, Any]], int]:
        """List objects page by page, and say as of which resourceVersion; an empty namespace means all.

        Of each object only what `keep` answers is kept: pages of whole objects take much memory. `from_memory`: the API
        server answers from its memory, on one page, cheap and maybe late.
        """
        accept = _METADATA if metadata_only else "application/json"
        items: list[dict[str, Any]] = []
        params = {"resourceVersion": "0"} if from_memory else {"limit": str(PAGE)}
        params |= {"labelSelector": labels} if labels else {}
        params |= {"fieldSelector": fields} if fields else {}
        while True:
            path = Where(kind, namespace).path()
            page = await self.call("GET", path, params=params, accept=accept, with_owners=False)
            # Of metadata alone, items call themselves PartialObjectMetadata, and an empty list is null.
            items += [keep({**item, "kind": kind}) for item in page.get("items") or ()]
            token = page["metadata"].get("continue")
            if not token:
                return items, version_of(page)
            params["continue"] = token

    async def apply(self, manifest: dict[str, Any], subresource: str = "") -> dict[str, Any]:
        """Apply server-side: what we set is ours, also where another client set it before."""
        path = where(manifest).path(subresource)
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self.call("PATCH", path, body=manifest, content="application/apply-patch+yaml", params=params)

    async def apply_status(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        """Apply the status; None when the object is gone, or is another one of the same name by now."""
        return await _none_if((404, 409), self.apply(manifest, "status"))

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        """Create an object; None when one of that name is there."""
        path = Where(manifest["kind"], manifest["metadata"]["namespace"]).path()
        try:
            return await self.call("POST", path, body=manifest, params={"fieldManager": FIELD_MANAGER})
        except KubeError as err:
            if err.status == 409 and err.reason == "AlreadyExists":
                return None
            raise

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Replace an object if its resourceVersion is still the one given (409 otherwise)."""
        return await self.call("PUT", where(manifest).path(), body=manifest, params={"fieldManager": FIELD_MANAGER})

    async def patch(self, place: Where, patch: Any) -> dict[str, Any] | None:
        """Patch an object: a JSON patch if a list is given, else a merge patch; None when it is not there."""
        content = "application/json-patch+json" if isinstance(patch, list) else "application/merge-patch+json"
        params = {"fieldManager": FIELD_MANAGER}
        return await _none_if((404,), self.call("PATCH", place.path(), body=patch, content=content, params=params))

    async def delete(self, place: Where) -> None:
        """Delete an object and, in the background, what it owns."""
        await _none_if((404,), self.call("DELETE", place.path(), body={"propagationPolicy": "Background"}))


async def _none_if(statuses: tuple[int, ...], call: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return await call
    except KubeError as err:
        if err.status in statuses:
            return None
        raise


def _without_owners(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Drop `managedFields` while a list is parsed, not afterwards: of thousands of objects they are 50 MB and more."""
    return {key: value for key, value in pairs if key != "managedFields"}


def _parse(text: str, build: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=build) if text else {}
    except ValueError:
        return {"message": text[:500]}
    return parsed if isinstance(parsed, dict) else {}
