"""The resource `OutboxProcessor`: the whole spec, embedding the data plane's models. `status.py` has the status.

`crd.py` generates the CustomResourceDefinition from these models, so a description here is what `kubectl explain`
prints, and a rule here is what the API server enforces. CEL rules say in their message what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, WithJsonSchema

from outbox_core.report import ResourceRef
from outbox_core.spec import (
    TARGETS,
    Delivery,
    Engine,
    ObjectName,
    ProcessorId,
    Rebuild,
    Source,
    SparkPlan,
    SpecModel,
    StartFrom,
    Target,
    TargetKind,
    read_other_version,
)
from outbox_operator.api.overlay import check_overlay
from outbox_operator.api.pod_rules import REMEDY, find_all_violations
from outbox_operator.api.shapes import SEPARATOR

GROUP: Final = "outbox-operator.dev"
VERSION: Final = "v1alpha1"
KIND: Final = "OutboxProcessor"
PLURAL: Final = "outboxprocessors"
API_VERSION: Final = f"{GROUP}/{VERSION}"

ACCEPT_ANNOTATION: Final = f"{GROUP}/accept-checkpoint"
REWIND_ANNOTATION: Final = f"{GROUP}/rewind-checkpoint"


def rule(expression: str, message: str) -> dict[str, JsonValue]:
    """One CEL validation, with the remedy in its message."""
    return {"rule": expression, "message": message}


Quantity = Annotated[
    str | int,
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "maxLength": 32,
            "pattern": r"^([0-9]+(\.[0-9]+)?|\.[0-9]+)([eE][-+]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$",
        }
    ),
]
"""A Kubernetes quantity such as 500m, 1 or 256Mi."""

PodTemplateOverlay = Annotated[
    dict[str, Any],
    AfterValidator(check_overlay),
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
"""A partial PodTemplateSpec; not schematised, which keeps the CRD small. What it may ask for is in `pod_rules.py`; what
the fields mean the API server judges at the workload."""

OVERLAY_HELP: Final = (
    "A partial pod template (`metadata`, `spec`) laid over the generated one: objects are merged, lists of named "
    "things (containers, volumes, env …) by name, other lists replaced. It may ask for scheduling, resources, labels, "
    "annotations, environment, containers under the Pod Security Standard restricted, and volumes of ConfigMaps and of "
    "the Secrets that this resource names as connections. The main container is called "
)


class ResourceRequirements(SpecModel):
    """Requests and limits of a container."""

    requests: Annotated[dict[str, Quantity], Field(max_length=16)] | None = Field(
        None, description="What the scheduler sets aside, for example cpu: 100m, memory: 128Mi."
    )
    limits: Annotated[dict[str, Quantity], Field(max_length=16)] | None = Field(
        None, description="What the container may use at most."
    )


class HandOver(SpecModel):
    """The resource that shall own the processorId from now on."""

    cluster: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        None, description="Cluster id of the new owner (its operator's OUTBOX_CLUSTER_ID). Absent: this cluster."
    )
    namespace: ObjectName = Field(description="Namespace of the new owner.")
    name: ObjectName = Field(description="Name of the new owner, an OutboxProcessor with the same processorId.")


class WorkerPods(SpecModel):
    """How the worker's pods look (engine Worker)."""

    shared: Annotated[str, Field(max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")] | None = Field(
        None,
        description=(
            "Run in the pod of all resources of this namespace that write the same name here, for many small "
            "processors: one process, and three connections for all. They need one source Secret. A change of one "
            "resource replaces the pod of all. Absent: pods of its own."
        ),
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        None, description="Image of the worker. Absent: the one the operator was installed with."
    )
    replicas: Annotated[int, Field(ge=0, le=100)] = Field(
        1,
        description=(
            "Mode Ordered: one handles messages, the others stand by and take over within delivery.leaseDuration. "
            "Modes Partitioned and Competing: all handle messages. "
            "0 stops processing and keeps the claim."
        ),
    )
    resources: ResourceRequirements | None = Field(
        None, description="Of the container `worker`. Absent: requests of 50m CPU and 96Mi, a limit of 512Mi memory."
    )
    pod_template: PodTemplateOverlay | None = Field(None, description=OVERLAY_HELP + "`worker`.")
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        30,
        description=(
            "How long a pod may take to finish or roll back its batch. Longer than a batch takes, or it is killed and "
            "the batch is repeated."
        ),
    )


class DriverPod(SpecModel):
    """The Spark driver's pod."""

    resources: ResourceRequirements | None = Field(
        None, description="Of the container `driver`. Absent: requests of 250m CPU and 1Gi, a limit of 2Gi memory."
    )
    pod_template: PodTemplateOverlay | None = Field(None, description=OVERLAY_HELP + "`driver`.")


class ExecutorPods(SpecModel):
    """The Spark executors' pods; the driver creates them."""

    instances: Annotated[int, Field(ge=1, le=1000)] = Field(1, description="How many executors.")
    cores: Annotated[int, Field(ge=1, le=64)] = Field(1, description="Tasks that one executor runs at once.")
    memory: Annotated[str, Field(max_length=16, pattern=r"^[0-9]+[kmgt]$")] = Field(
        "512m", description="Heap of one executor as Spark writes it: 512m, 2g."
    )
    pod_template: PodTemplateOverlay | None = Field(None, description=OVERLAY_HELP + "`executor`.")


class Spark(SparkPlan):
    """The Spark application (engine Spark): one driver pod in client mode and its executors."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                rule(
                    "!has(self.volumes) || "
                    "self.volumes.all(v, !self.volumes.exists(w, w.name != v.name && w.mountPath == v.mountPath))",
                    "two volumes have the same mountPath: give each its own",
                ),
            ]
        }
    )

    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        None, description="Image of driver and executors. Absent: the one the operator was installed with."
    )
    driver: DriverPod = Field(default_factory=DriverPod, description="The driver's pod.")
    executor: ExecutorPods = Field(default_factory=ExecutorPods, description="The executors' pods.")

    def plan(self) -> SparkPlan:
        """Reduce to what the driver process must know."""
        return SparkPlan(**{name: getattr(self, name) for name in SparkPlan.model_fields})


_HAS_TARGET: Final = "has(self.target)"
_OF_WORKER: Final = [kind for kind in TARGETS if Engine.WORKER in kind.engines]
_OF_SPARK: Final = [kind for kind in TARGETS if Engine.SPARK in kind.engines]
_IN_TRANSACTION: Final = [kind for kind in _OF_WORKER if kind.transactional]


def _any_of(kinds: Iterable[TargetKind]) -> str:
    """Write CEL that says whether the target is one of these."""
    return " || ".join(f"has(self.{kind.path})" for kind in kinds)


def _join(kinds: Iterable[TargetKind], between: str) -> str:
    return between.join(kind.path for kind in kinds)


_PROJECTS: Final = f"({_HAS_TARGET} && ({_any_of(_IN_TRANSACTION)}))"
_IS_APART: Final = (
    "(has({0}.target) && ("
    + " || ".join(
        f"(has({{0}}.{kind.path}) && has({{0}}.{kind.path}.connection))" for kind in _IN_TRANSACTION if kind.connects
    )
    + "))"
)
_NAMES: Final = " or ".join(kind.name for kind in _IN_TRANSACTION)
_NUMBERED: Final = [kind for kind in TARGETS if kind.numbers]
_OUTSIDE: Final = f"({_HAS_TARGET} && ({_any_of(kind for kind in TARGETS if not kind.transactional)}))"
_BY_ITSELF: Final = [kind for kind in _OF_WORKER if kind.own_transactions]
_NEVER_TRANSACTIONAL: Final = [kind for kind in TARGETS if not (kind.transactional or kind.own_transactions)]

SPEC_RULES: Final[tuple[JsonValue, ...]] = (
    rule(
        f"self.engine != 'Worker' || {_HAS_TARGET}",
        f"engine Worker needs a target: set one of {_join(_OF_WORKER, ', ')}",
    ),
    rule(
        "self.engine != 'Worker' || !has(self.spark)",
        "spark goes with engine Spark: remove it, or set engine: Spark",
    ),
    rule("self.engine != 'Spark' || has(self.spark)", "engine Spark needs the block spark: set at least spark: {}"),
    rule(
        f"self.engine != 'Spark' || !has(self.spark) || {_HAS_TARGET} || has(self.spark.application)",
        f"engine Spark needs something to do: set {_join(_OF_SPARK, ', ')} or spark.application",
    ),
    *(
        rule(
            f"self.engine != 'Worker' || !has(self.target) || !has(self.{kind.path})",
            f"{kind.path} needs engine: Spark",
        )
        for kind in TARGETS
        if kind not in _OF_WORKER
    ),
    rule(
        f"self.engine != 'Spark' || !has(self.target) || {_any_of(_OF_SPARK)}",
        f"engine Spark knows {_join(_OF_SPARK, ' and ')}; for the others set engine: Worker",
    ),
    rule(
        "self.engine != 'Spark' || (self.worker.replicas == 1 && !has(self.worker.image) && "
        "!has(self.worker.podTemplate) && !has(self.worker.resources))",
        "worker goes with engine Worker: a Spark processor has one driver (spark.driver); stop it with suspend: true",
    ),
    rule(
        "!has(self.delivery.guarantee) || self.delivery.guarantee != 'Transactional' || "
        f"!({_HAS_TARGET} && ({_any_of(_NEVER_TRANSACTIONAL)}))",
        "a target outside the database is not part of the transaction: set delivery.guarantee: AtLeastOnce or leave it "
        "out",
    ),
    rule(
        "!has(self.delivery.guarantee) || self.delivery.guarantee != 'Transactional' || "
        f"self.delivery.mode != 'Competing' || !({_HAS_TARGET} && ({_any_of(_BY_ITSELF)}))",
        f"{_join(_BY_ITSELF, ' and ')} with delivery.guarantee Transactional needs delivery.mode Ordered or "
        "Partitioned: consumers in mode Competing have no epoch by which one could be shut out",
    ),
    rule(
        "self.engine != 'Spark' || !has(self.delivery.guarantee) || self.delivery.guarantee == 'Transactional'",
        "engine Spark is Transactional in all it does: leave delivery.guarantee out",
    ),
    rule(
        f"self.delivery.checkpoint != 'BeforeHandling' || !{_OUTSIDE}",
        f"delivery.checkpoint BeforeHandling needs a target in the same transaction: {_NAMES}",
    ),
    rule(
        "self.engine != 'Spark' || self.delivery.mode == 'Ordered'",
        "engine Spark reads in parallel by itself: leave delivery.mode out and set spark.partitions",
    ),
    rule(
        "self.engine != 'Spark' || (self.delivery.whenExhausted == 'Stop' && !has(self.delivery.rateLimit) && "
        "(!has(self.delivery.blocks) || self.delivery.blocks == 'Partition'))",
        "engine Spark stops at a micro-batch that fails: leave delivery.whenExhausted, blocks and rateLimit out",
    ),
    rule(
        "self.delivery.mode != 'Ordered' || !has(self.source.table) || !has(self.source.table.columns.deliverAfter)",
        "delayed messages (source.table.columns.deliverAfter) need delivery.mode: Partitioned or Competing: in mode "
        "Ordered everything would wait for them",
    ),
    rule(
        "self.delivery.mode != 'Ordered' || !has(self.delivery.blocks) || self.delivery.blocks != 'Key' || "
        "!has(self.source.table) || has(self.source.table.columns.partitionKey) || has(self.delivery.key)",
        "delivery.blocks: Key needs a key: set source.table.columns.partitionKey or delivery.key",
    ),
    rule(
        "!has(self.delivery.competing) || !has(self.delivery.competing.queue) || "
        "(!has(self.source.table) && self.startFrom.type == 'Beginning')",
        "delivery.competing.queue is a table of its own, handled from its beginning: leave source.table and startFrom "
        "out",
    ),
    rule(
        "self.delivery.mode != 'Competing' || !has(self.source.cursor)",
        "mode Competing hands out batches and has no cursor: leave source.cursor out",
    ),
    rule(
        f"!{_HAS_TARGET} || !({_any_of(_NUMBERED)}) || (self.delivery.mode != 'Competing' && "
        "has(self.source.cursor) && self.source.cursor == 'TransactionOrder')",
        f"{_join(_NUMBERED, ' and ')} numbers messages in one order: set source.cursor: TransactionOrder, and "
        "delivery.mode: Ordered or Partitioned",
    ),
    rule(
        "self.engine != 'Spark' || !has(self.source.cursor) || self.source.cursor != 'Snapshot'",
        "source.cursor Snapshot needs engine Worker: a Spark offset is one pair; leave source.cursor out, or set "
        "engine: Worker",
    ),
    rule(
        "!has(self.delivery.partitions) || self.worker.replicas <= self.delivery.partitions.count",
        "worker.replicas must not be above delivery.partitions.count: a replica beyond it would own nothing",
    ),
    rule(
        "!has(self.delivery.partitions) || !has(self.source.table) || "
        "has(self.source.table.columns.partitionKey) || has(self.delivery.partitions.key.column) || "
        "has(self.delivery.partitions.key.data) || has(self.delivery.partitions.key.metadata)",
        "mode Partitioned needs a key: set source.table.columns.partitionKey or delivery.partitions.key",
    ),
    rule(
        "self.engine != 'Spark' || !has(self.target) || !has(self.target.sql) || !has(self.target.sql.connection)",
        "engine Spark writes to the source's database: leave target.sql.connection out, or set engine: Worker",
    ),
    rule(
        f"{_IS_APART.format('self')} == {_IS_APART.format('oldSelf')}",
        "target connection cannot be added or taken away, the checkpoint lives in that database: create another "
        "resource, with startFrom: {type: Processor, processorId: …} to go on from here",
    ),
    rule(
        f"!has(self.rebuildOf) || (self.engine == 'Worker' && {_PROJECTS} && self.delivery.mode != 'Competing' && "
        "(!has(self.delivery.guarantee) || self.delivery.guarantee == 'Transactional'))",
        f"rebuildOf needs engine Worker, {_join(_IN_TRANSACTION, ' or ')}, delivery.mode Ordered or Partitioned and "
        "guarantee Transactional: the swap is one transaction",
    ),
    rule(
        f"self.delivery.mode != 'Competing' || !{_IS_APART.format('self')}",
        "mode Competing hands out batches beside the messages: leave the target's connection out, or set "
        "delivery.mode: Partitioned",
    ),
    rule(
        "self.delivery.mode != 'Competing' || self.startFrom.type != 'Processor'",
        "mode Competing does not start from another processor's checkpoint: set startFrom to a position or a time",
    ),
    rule(
        "!has(self.worker.shared) || (self.engine == 'Worker' && self.delivery.mode != 'Partitioned' && "
        f"!has(self.rebuildOf) && !{_IS_APART.format('self')} && (!has(self.target) || !has(self.target.python)))",
        "worker.shared is for small processors: it goes with engine Worker, delivery.mode Ordered or Competing, a "
        "target without code of its own (python) and without another database, and no rebuildOf",
    ),
    rule(
        "!has(self.worker.shared) || (!has(self.worker.image) && !has(self.worker.podTemplate) && "
        "!has(self.worker.resources) && self.worker.terminationGracePeriodSeconds == 30)",
        "the pod of worker.shared is made for several resources: leave worker.image, podTemplate, resources and "
        "terminationGracePeriodSeconds out",
    ),
    rule(
        "!has(self.target) || !has(self.target.parquet) || !has(self.spark) || "
        "(has(self.spark.volumes) && self.spark.volumes.exists(v, "
        "(self.target.parquet.path + '/').startsWith(v.mountPath.endsWith('/') ? v.mountPath : v.mountPath + '/')))",
        "target.parquet.path must lie on one of spark.volumes, which driver and executors share",
    ),
)


class ProcessorSpec(SpecModel):
    """What is wanted."""

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-validations": list(SPEC_RULES)})

    processor_id: ProcessorId | None = Field(
        None,
        description=(
            "Identity of the processor in the database: its checkpoints, claim and leases. At most one resource "
            "in the world owns it. Absent: the resource's name. Cannot be changed."
        ),
    )
    suspend: bool = Field(
        False, description="Finish or roll back the batch and handle nothing; checkpoint and claim are kept."
    )
    engine: Engine = Field(Engine.WORKER, description="Worker: pods of the worker image. Spark: a Spark application.")
    source: Source = Field(description="Where the messages are.")
    start_from: StartFrom = Field(
        default_factory=StartFrom, description="Where to start when no checkpoint is stored yet."
    )
    delivery: Delivery = Field(default_factory=Delivery, description="How messages are handled.")
    target: Target | None = Field(None, description="What to do with the messages: exactly one.")
    rebuild_of: Rebuild | None = Field(
        None,
        description=(
            "Build a projection anew beside the one that is read, into tables of its own, and swap: this processor "
            "starts by startFrom, catches up with the other one, and replaces it in one transaction. Condition "
            "`Swapped` says when; the other one can never run again."
        ),
    )
    hand_over_to: HandOver | None = Field(
        None,
        description=(
            "Stop here and give the processorId to another resource. Workers are stopped first; once the claim is "
            "given, this resource handles nothing while the field is set."
        ),
    )
    worker: WorkerPods = Field(default_factory=WorkerPods, description="The pods of engine Worker.")
    spark: Spark | None = Field(None, description="The application of engine Spark.")


_ID: Final = "(has({0}.spec.processorId) ? {0}.spec.processorId : {0}.metadata.name)"

ROOT_RULES: Final = (
    rule(
        "size(self.metadata.name) <= 52",
        "metadata.name must not be longer than 52 characters: names of pods and jobs are made from it",
    ),
    rule(
        "self.metadata.name.matches('^[a-z][-a-z0-9]*$')",
        "metadata.name must be lower-case letters, digits and dashes, starting with a letter: a Service has it too",
    ),
    rule(
        f"{_ID.format('self')} == {_ID.format('oldSelf')}",
        "processorId cannot be changed (absent, it is the name): create another resource and hand over to it",
    ),
    rule(
        "self.spec.engine == oldSelf.spec.engine || (self.spec.suspend && oldSelf.spec.suspend)",
        "engine can be changed only while suspended: set suspend: true first, then change engine, then resume",
    ),
    rule(
        f"!has(self.spec.startFrom.processorId) || self.spec.startFrom.processorId != {_ID.format('self')}",
        "startFrom.processorId is this very processor: name another one",
    ),
    rule(
        f"!has(self.spec.rebuildOf) || self.spec.rebuildOf.processorId != {_ID.format('self')}",
        "rebuildOf.processorId is this very processor: give this one a processorId of its own",
    ),
    rule(
        "self.spec.source.schemaName == oldSelf.spec.source.schemaName",
        "source.schemaName cannot be changed, claim and checkpoints live there: create another resource",
    ),
)


class Processor(SpecModel):
    """A resource as the operator works with it: identity, spec, and what people wrote in its annotations."""

    namespace: str
    name: str
    uid: str
    generation: int
    cluster: str
    annotations: dict[str, str] = Field(default_factory=dict)
    spec: ProcessorSpec
    ignored: tuple[str, ...] = ()
    """Fields of the spec that this version does not know: a newer CRD let them in."""

    @property
    def processor_id(self) -> str:
        """The identity in the database."""
        return self.spec.processor_id or self.name

    @property
    def ref(self) -> ResourceRef:
        """The resource in the world."""
        return ResourceRef(cluster=self.cluster, namespace=self.namespace, name=self.name, uid=self.uid)

    @property
    def successor(self) -> ResourceRef | None:
        """The resource that shall own the processorId from now on: `spec.handOverTo`."""
        target = self.spec.hand_over_to
        if target is None:
            return None
        return ResourceRef(cluster=target.cluster or self.cluster, namespace=target.namespace, name=target.name)


Parse = Callable[[dict[str, Any]], Processor]
"""Reads a resource as this installation allows it."""


class NotAllowedError(Exception):
    """The spec asks for pods that this installation does not allow; the message has the fields and what to do."""


def parse_processor(body: dict[str, Any], cluster: str, *, unrestricted: bool = False) -> Processor:
    """Read a resource as the API server returns it; `unrestricted`: a podTemplate may ask for anything.

    Raises:
        pydantic.ValidationError: the spec is none that this version knows (an older CRD let it in, or a newer one).
        NotAllowedError: a podTemplate asks for more than `pod_rules.py` allows.

    """
    meta = body["metadata"]
    spec, ignored = read_other_version(ProcessorSpec, body["spec"])
    violations = [] if unrestricted else find_all_violations(body["spec"])
    if violations:
        raise NotAllowedError(f"{SEPARATOR.join(violations)}. {REMEDY}")
    return Processor(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        cluster=cluster,
        annotations=meta.get("annotations") or {},
        spec=spec,
        ignored=ignored,
    )
