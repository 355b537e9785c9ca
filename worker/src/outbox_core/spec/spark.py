"""What only the engine Spark understands."""

from __future__ import annotations

from datetime import timedelta
from pathlib import PurePosixPath
from typing import Annotated, Final

from pydantic import Field

from outbox_core.spec.base import Duration, ModuleName, ObjectName, ObjectRef, SpecModel, rule, rules

SAID_BY_FIELDS: Final = ("spark.executor.instances", "spark.executor.cores", "spark.executor.memory")
"""Settings that the fields of `spark.executor` say."""
SAID_BY_OPERATOR: Final = (
    "spark.master", "spark.submit.deployMode", "spark.driver.port", "spark.blockManager.port",
    "spark.driver.blockManager.port", "spark.ui.port",
)  # fmt: skip
"""Settings that make driver and executors find each other. `spark.kubernetes.…` is judged with the podTemplates."""


class Application(SpecModel):
    """A user's PySpark code."""

    module: ModuleName = Field(description="Module to import, from the ConfigMap or the image.")
    config_map_ref: ObjectRef | None = Field(
        None, description="ConfigMap whose keys are Python files. Absent: the image has the module."
    )


class Trigger(SpecModel):
    """When a micro-batch starts."""

    processing_time: Duration = Field(
        timedelta(seconds=2),
        description="Look for messages this often; after a full micro-batch the next one starts at once.",
    )


class SparkVolume(SpecModel):
    """A volume that driver and executors mount at the same path."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of the volume."
    )
    claim_name: ObjectName = Field(description="PersistentVolumeClaim in the same namespace.")
    mount_path: Annotated[str, Field(min_length=2, max_length=1024, pattern=r"^/")] = Field(
        description="Where driver and executors see it."
    )

    def holds(self, path: str) -> bool:
        """Tell whether a path lies on this volume; the CRD's rule for target.parquet.path says the same."""
        return PurePosixPath(path).is_relative_to(self.mount_path)


class SparkPlan(SpecModel):
    """What the Spark driver must know beyond source, delivery and target."""

    application: Application | None = Field(
        None,
        description=(
            "Code with `transform(messages) -> rows` (streaming DataFrames; the rows go to `target`) or "
            "`handle(messages, effects)` (called for each micro-batch; it says itself what is written, and there is no "
            "`target`)."
        ),
    )
    trigger: Trigger = Field(default_factory=Trigger, description="When a micro-batch starts.")
    partitions: Annotated[int, Field(ge=1, le=1024)] = Field(
        2, description="Into how many pieces one micro-batch is read in parallel."
    )
    query_checkpoint_path: Annotated[str, Field(max_length=1024, pattern=r"^/")] = Field(
        "/var/lib/outbox/query",
        description="Directory of Spark's own query checkpoint, on a volume that outlives the driver.",
    )
    config: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Spark configuration, key to value; `spark.driver.memory` (512m) is the heap of the driver's JVM; the pod "
            "needs about 500 MB beside it. What the fields here and the operator say (executors, ports) is refused."
        ),
        json_schema_extra=rules(
            rule(
                f"!self.exists(key, key in {[*SAID_BY_FIELDS, *SAID_BY_OPERATOR]})",
                f"spark.config: {', '.join(SAID_BY_FIELDS)} are written as spark.executor: instances, cores, memory; "
                f"{', '.join(SAID_BY_OPERATOR)} are the operator's. Take them out",
            )
        ),
    )
    volumes: list[SparkVolume] = Field(
        default_factory=list,
        max_length=16,
        description=(
            "Volumes of driver and executors: Parquet output, and Spark's query checkpoint. Where a transform keeps "
            "state (aggregation, deduplication, stream join) queryCheckpointPath must lie on one."
        ),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )

    def shares(self, path: str) -> bool:
        """Say whether driver and executors see the same directory at this path."""
        return any(volume.holds(path) for volume in self.volumes)
