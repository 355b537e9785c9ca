"""PURE: writes the rules of `pod_rules.py` as two ValidatingAdmissionPolicies, which the chart installs.

The API server asks them before anything is stored, so that a resource that asks for too much never comes to be. The
operator asks the same rules again (`resources.py`): a cluster may lack the policy, or have resources from before it.
`make crds` writes the files; names, labels and bindings are the chart's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from outbox_operator.api.pod_rules import CONNECTIONS, EXECUTOR, OVERLAY, REMEDY, SETTINGS, SPARK_CONFIG, TEMPLATES
from outbox_operator.api.resources import GROUP, PLURAL, VERSION
from outbox_operator.api.shapes import SEPARATOR, Fields, literal

MARKER: Final = "sparkexecutors"
"""A resource that does not exist: the right to create it marks the service accounts of Spark drivers."""
_PATH: Final = "template.path + ''"
_SPECS: Final = (
    "variables.templates.filter(template, type(template.value) == map && has(template.value.spec) "
    "&& type(template.value.spec) == map)"
)
"""The templates whose spec is an object; of another the outline says so."""


def build_policies() -> dict[str, dict[str, Any]]:
    """Build the specs of the policies, by name."""
    return {"pod-templates": _build_for_resources(), "spark-executors": _build_for_executors()}


def _build_for_resources() -> dict[str, Any]:
    secrets = [_if_there(f"{place}.secretRef.name", "[{}]") for place in CONNECTIONS]
    templates = [
        _if_there(place, f"[{{'path': dyn('spec.{place}'), 'own': dyn('{own}'), 'value': dyn({{}})}}]")
        for place, own in TEMPLATES.items()
    ]
    settings = SPARK_CONFIG.cel(f"object.spec.{SETTINGS}", literal(f"spec.{SETTINGS}"))
    return _build_policy(
        {"apiGroups": [GROUP], "apiVersions": [VERSION], "resources": [PLURAL]},
        # What changes no spec is let through: finalizers and annotations of a resource from before the policy.
        {"spec-changes": "request.operation == 'CREATE' || object.spec != oldObject.spec"},
        {"secrets": " + ".join(secrets), "templates": " + ".join(templates)},
        {**_build_parts(OVERLAY), "settings": _if_there(SETTINGS, f"[{settings}]")},
    )


def _build_for_executors() -> dict[str, Any]:
    account = "request.userInfo.username.startsWith('system:serviceaccount:' + request.namespace + ':')"
    marked = f"authorizer.group('{GROUP}').resource('{MARKER}').namespace(request.namespace).check('create').allowed()"
    return _build_policy(
        {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]},
        {"by-a-spark-driver": f"{account} && request.userInfo.username.endsWith('-driver') && {marked}"},
        # Without a type: the rules ask of every value what it is.
        {"templates": "[{'path': dyn('pod'), 'value': dyn(object)}]"},
        _build_parts(EXECUTOR),
    )


def _build_parts(shape: Fields) -> dict[str, str]:
    """Write the rules of a pod as one CEL expression for each field of its spec, by name.

    The API server compiles one nested expression of them all in more than twice the time.
    """
    spec = shape.allowed["spec"]
    if not isinstance(spec, Fields):
        raise TypeError("a pod's spec is an object")
    outline = replace(shape, allowed={**shape.allowed, "spec": replace(spec, allowed=dict.fromkeys(spec.allowed))})
    parts = {"outline": f"variables.templates.map(template, {outline.cel('template.value', _PATH)})"}
    for name, inner in spec.allowed.items():
        if inner is not None:
            part = Fields({name: inner}, closed=False).cel("template.value.spec", f"{_PATH[:-1]}.spec'")
            parts[name] = f"variables.specs.map(template, {part})"
    return parts


def _build_policy(
    resources: dict[str, list[str]], conditions: dict[str, str], variables: dict[str, str], parts: dict[str, str]
) -> dict[str, Any]:
    every = " + ".join(f"variables.{name}" for name in parts)
    found = {"violations": f"({every}).filter(text, text != '').join({literal(SEPARATOR)})"}
    return {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [{**resources, "operations": ["CREATE", "UPDATE"]}]},
        "matchConditions": [{"name": name, "expression": text} for name, text in conditions.items()],
        "variables": [
            {"name": name, "expression": text}
            for name, text in {**variables, "specs": _SPECS, **parts, **found}.items()
        ],
        "validations": [
            {
                "expression": "variables.violations == ''",
                "messageExpression": f"variables.violations + {literal(f'. {REMEDY}')}",
                "message": f"asks for more than this installation allows. {REMEDY}",
                "reason": "Forbidden",
            }
        ],
    }


def _if_there(place: str, then: str) -> str:
    """Write CEL of a list that is empty when a field is absent; `{}` in `then` stands for the field."""
    parts = place.split(".")
    paths = [".".join(("object.spec", *parts[: n + 1])) for n in range(len(parts))]
    there = " && ".join(f"has({path})" for path in paths)
    return f"({there} ? {then.replace('{}', paths[-1])} : [])"
