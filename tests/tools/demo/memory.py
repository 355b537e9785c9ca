"""Resident memory of the operator and of the workers, as the kernel counts it; as they say themselves elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.support.processes import memory_mb
from tests.tools.demo.place import BESIDE, NAMESPACE, OPERATOR_NAMESPACE, PROCESSORS
from tests.tools.demo.processes import find_processes

if TYPE_CHECKING:
    from tests.tools.demo.scene import Demo

PROGRAMS: Final = ("outbox_operator", "outbox_worker", "outbox_spark", "java")


def measure_memory(demo: Demo) -> None:
    """Add the figures to the demo's measures."""
    if not demo.place.local:
        demo.measured.append(("resident memory", "not measured on a cluster of your own"))
        return
    pods = demo.cluster.items(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods")
    for processor in (*PROCESSORS, *BESIDE):
        pods += [pod for pod in demo.cluster.pods(processor, NAMESPACE) if resident(pod)]
    demo.measured += [(f"resident memory, {pod['metadata']['name']}", f"{resident(pod):.0f} MB") for pod in pods]


def resident(pod: dict[str, Any]) -> float:
    """Sum the pod's processes: the Python one, and a Spark driver's Java."""
    return sum(memory_mb(pid, "resident") for program in PROGRAMS for pid in find_processes(pod, program)[:1])
