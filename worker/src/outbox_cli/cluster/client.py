"""The one module that talks to a Kubernetes API server, with the user's own kubeconfig and rights.

Imported only by commands against a cluster: it needs the package `kubernetes`, which a worker's image has not.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.config import ConfigException
from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, KubeConfigLoader, KubeConfigMerger

from outbox_cli.errors import AwayError, CommandError, RefusedError, UsageError
from outbox_operator.api.resources import GROUP, PLURAL, VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TIMEOUT_SECONDS: Final = 30
Body = dict[str, Any]
_NO_CRD: Final = (
    "the cluster has no OutboxProcessors (404 page not found): helm install outbox-operator charts/outbox-operator "
    "(docs/install.md)"
)


class Cluster:
    """One API server, and the namespace that is meant where none is named."""

    def __init__(self, kubeconfig: Path | None, context: str | None, namespace: str | None) -> None:
        """Read the kubeconfig as kubectl does."""
        file = None if kubeconfig is None else str(kubeconfig)
        try:
            self._api = config.new_client_from_config(file, context)  # type: ignore[no-untyped-call]
            read = KubeConfigMerger(file or KUBE_CONFIG_DEFAULT_LOCATION).config  # type: ignore[no-untyped-call]
            named = KubeConfigLoader(read, active_context=context).current_context  # type: ignore[no-untyped-call]
        except (ConfigException, OSError, yaml.YAMLError, TypeError, ValueError) as err:
            # The client looks at nothing of a file that is another thing than a mapping.
            raise CommandError(f"no usable kubeconfig: {err}") from err
        self.namespace = namespace or named["context"].get("namespace") or "default"

    def list(self, *, everywhere: bool) -> list[Body]:
        """Fetch the processors of the namespace, or of all."""
        items: list[Body] = self._call("GET", self._path(None if everywhere else self.namespace))["items"]
        return items

    def get(self, name: str) -> Body:
        """Fetch one."""
        return self._call("GET", self._path_of(name))

    def list_deployments(self, selector: str) -> Sequence[Body]:
        """Fetch the Deployments of every namespace that have the labels."""
        items: Sequence[Body] = self._call("GET", "/apis/apps/v1/deployments", labelSelector=selector)["items"]
        return items

    def patch(self, name: str, patch: Body) -> Body:
        """Merge a patch into one; refused when `metadata.uid` in the patch is another one's by now."""
        return self._call("PATCH", self._path_of(name), patch)

    def _path(self, namespace: str | None) -> str:
        place = f"/apis/{GROUP}/{VERSION}" + ("" if namespace is None else f"/namespaces/{namespace}")
        return f"{place}/{PLURAL}"

    def _path_of(self, name: str) -> str:
        if not name or "/" in name:
            raise UsageError(f"{name!r} is no name of a resource: say it as `kubectl get obp` shows it")
        return f"{self._path(self.namespace)}/{name}"

    def _call(self, method: str, path: str, body: Body | None = None, **query: str) -> Body:
        headers = {"Accept": "application/json", "Content-Type": "application/merge-patch+json"}
        if body is not None:
            query |= {"fieldManager": "outbox-cli", "fieldValidation": "Strict"}
        request = self._api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._api.call_api(*request, _request_timeout=TIMEOUT_SECONDS)
            text = answer.read()
        except (urllib3.exceptions.HTTPError, client.ApiException, OSError) as err:
            raise AwayError(f"the API server cannot be reached: {err}") from err
        return parse_answer(answer.status, text)


def parse_answer(status: int, text: bytes) -> Body:
    """Read an answer of the API server; a refusal becomes an error with the server's own words."""
    try:
        parsed = json.loads(text) if text else {}
    except ValueError:
        parsed = {}
    if status == 404 and not parsed:  # the answer about an object that is not there is JSON
        raise CommandError(_NO_CRD)
    said = parsed.get("message") or text[:300].decode(errors="replace") if isinstance(parsed, dict) else str(parsed)
    if status in (404, 409):
        raise RefusedError(f"{said or status}")
    if status == 429 or status >= 500:
        raise AwayError(f"the API server answers {status}: {said}")
    if status >= 400:
        raise CommandError(f"the API server answers {status}: {said}")
    found: Body = parsed
    return found
