"""Several resources in one pod: each with its owner, checkpoint and conditions, as if the pod were its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.acceptance.scenarios import Scenarios
from tests.support.kubernetes.asking import ask_pod
from tests.support.kubernetes.cluster import wait
from tests.support.kubernetes.room import BY_PAIRS

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.cluster import Body
    from tests.support.kubernetes.room import Resource, Room

SHARED = {"shared": "small"}
POD = "outbox-operator.dev/processor=shared.small,outbox-operator.dev/role=worker"
NAMES = ("bills", "mails", "stock")
scenarios = Scenarios()


def sharing(room: Room, name: str, **spec: Any) -> Resource:
    """Create a processor that writes into a table of its own name, in the shared pod."""
    room.shop.query(f"CREATE TABLE IF NOT EXISTS {name} (position bigint)")
    target = {"sql": {"statement": f"INSERT INTO public.{name} SELECT position FROM batch"}}
    asked: dict[str, Any] = {"target": target, "worker": SHARED, "source": BY_PAIRS} | spec
    return room.processor(name, **asked)


def until_count(room: Room, name: str, count: int) -> None:
    def look() -> bool:
        return len(found(room, name)) >= count

    wait(f"{name} handled {count}", look, within=90, explain=lambda: room.cluster.explain(room.namespace))
    assert len(found(room, name)) == len(set(found(room, name))) == count


def found(room: Room, name: str) -> list[int]:
    return [row[0] for row in room.shop.query(f"SELECT position FROM {name}")]


def pods(room: Room) -> list[Body]:
    """Shared pods that have not ended."""
    running = room.cluster.items("Pod", room.namespace, POD)
    return [pod for pod in running if pod["status"].get("phase") not in ("Succeeded", "Failed")]


def settled(room: Room) -> str:
    """The name of the one shared pod, once there is no other one."""

    def look() -> list[Body]:
        there = pods(room)
        return there if len(there) == 1 and "deletionTimestamp" not in there[0]["metadata"] else []

    name: str = wait("one shared pod", look, within=90)[0]["metadata"]["name"]
    return name


def sessions(room: Room) -> int:
    """Connections of the shared pods."""
    counted: int = room.shop.query(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND starts_with(application_name, 'outbox small-shared')"
    )[0][0]
    return counted


@scenarios.add
def several_resources_share_a_pod_and_come_and_go(rooms: Rooms) -> None:
    with rooms.room() as room:
        bills, mails, stock = (sharing(room, name) for name in NAMES)
        for resource in (bills, mails, stock):
            resource.until_ready()
        settled(room)
        assert [each["metadata"]["name"] for each in room.cluster.items("Deployment", room.namespace)] == [
            "small-shared"
        ]
        room.shop.produce(5)
        for name in NAMES:
            until_count(room, name, 5)
        assert sessions(room) <= 4
        mails.spec(suspend=True)
        mails.until_ready("Suspended")
        room.shop.produce(2)
        until_count(room, "bills", 7)
        until_count(room, "stock", 7)
        assert len(found(room, "mails")) == 5, "suspended, it handles nothing"
        mails.spec(suspend=False)
        until_count(room, "mails", 7)
        stock.delete()
        wait(
            "the claim of what was deleted is released",
            lambda: room.shop.query("SELECT count(*) FROM outbox.processor_claims") == [(2,)],
            within=90,
            explain=lambda: room.cluster.explain(room.namespace),
        )
        mails.spec(worker={"shared": None})
        mails.until("it has pods of its own", mails.pods)
        room.shop.produce(1)
        until_count(room, "bills", 8)
        until_count(room, "mails", 8)
        bills.delete()
        wait("the shared pod is gone with the last resource", lambda: not pods(room), within=90)


@scenarios.add
def a_resource_that_cannot_run_leaves_the_others_of_its_pod_alone(rooms: Rooms) -> None:
    with rooms.room() as room:
        bills = sharing(room, "bills")
        bills.until_ready()
        missing = {"sql": {"statement": "INSERT INTO public.missing SELECT position FROM batch"}}
        broken = sharing(room, "broken", target=missing)
        twin = sharing(room, "twin", processorId="bills")
        room.shop.produce(3)
        until_count(room, "bills", 3)
        broken.until_condition("Ready", "False")
        broken.until("it names the table", lambda: "missing" in broken.condition("Ready").get("message", ""))
        twin.until_condition("Ready", "False", "ClaimHeld")
        twin.until("no pod runs it", lambda: "twin" not in str(pods(room)))
        bills.until_ready()
        room.shop.query("CREATE TABLE missing (position bigint)")
        broken.spec(delivery={"batchSize": 50})  # it may have given up by now
        until_count(room, "missing", 3)
        broken.until_ready()
        bills.delete()
        twin.until_ready(within=180)
        room.shop.produce(2)
        until_count(room, "twin", 2)


@scenarios.add
def a_resource_that_is_suspended_stops_though_no_pod_can_follow(rooms: Rooms) -> None:
    with rooms.room() as room:
        two = {"worker": SHARED | {"replicas": 2}}
        bills, mails = sharing(room, "bills", **two), sharing(room, "mails", **two)
        for resource in (bills, mails):
            resource.until_ready()
        wait("a pod stands by", lambda: len(pods(room)) == 2, within=90)
        room.shop.produce(3)
        until_count(room, "mails", 3)
        place = ("ResourceQuota", room.namespace, "full")
        meta, hard = {"namespace": room.namespace, "name": "full"}, {"hard": {"pods": "0"}}
        room.cluster.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta, "spec": hard})
        mails.spec(suspend=True)
        mails.until_ready("Suspended")
        room.shop.produce(2)
        room.cluster.delete(*place)
        until_count(room, "bills", 5)
        assert len(found(room, "mails")) == 3, "suspended, it handles nothing"
        wait("a pod stands by again", lambda: len(pods(room)) == 2, within=90)
        strategy = room.cluster.need("Deployment", room.namespace, "small-shared")["spec"]["strategy"]["type"]
        assert strategy == "RollingUpdate", "the next change waits for one pod after the other"


@scenarios.add
def a_conflict_of_one_resource_waits_for_a_person_and_the_pods_others_go_on(rooms: Rooms) -> None:
    with rooms.room() as room:
        bills, mails = sharing(room, "bills"), sharing(room, "mails")
        for resource in (bills, mails):
            resource.until_ready()
        room.shop.produce(5)
        until_count(room, "bills", 5)
        until_count(room, "mails", 5)
        room.shop.query(
            "UPDATE outbox.processor_checkpoints SET last_processed_position = last_processed_position + 1 "
            "WHERE processor_id = 'bills'"
        )
        room.shop.produce(1)
        bills.until_condition("Stalled", "True")
        until_count(room, "mails", 6)
        mails.until_ready()
        opened = bills.until("the conflict is told", lambda: bills.status.get("conflicts", {}).get("open"))
        bills.annotate(accept_checkpoint=f"{opened['id']}={opened['stored']}")
        bills.until_ready()
        room.shop.produce(2)
        until_count(room, "bills", 8)
        until_count(room, "mails", 8)


@scenarios.add_at_night
def two_hundred_resources_fit_into_one_pod(rooms: Rooms) -> None:
    with rooms.room() as room:
        room.shop.query("CREATE TABLE counted (name text, position bigint)")
        made = []
        for number in range(200):
            statement = f"INSERT INTO public.counted SELECT 'p{number}', position FROM batch"
            worker: dict[str, Any] = {"target": {"sql": {"statement": statement}}, "worker": SHARED}
            made.append(room.processor(f"p{number}", **worker))
        for resource in made:
            resource.until_ready(within=240)
        settled(room)
        room.shop.produce(3)
        wait(
            "all handled all",
            lambda: room.shop.query("SELECT count(DISTINCT (name, position)), count(*) FROM counted") == [(600, 600)],
            within=90,
            explain=lambda: room.cluster.explain(room.namespace),
        )
        (pod,) = pods(room)
        status, text = ask_pod(rooms.cluster, pod, "/metrics")
        assert status == 200, text
        memory = next(line for line in text.splitlines() if line.startswith("process_resident_memory_bytes "))
        assert float(memory.split()[1]) / len(made) < 8 * 2**20
        assert sessions(room) <= len(made) / 10
        for resource in made:
            resource.delete()
        wait(
            "all claims are released, by a job each",
            lambda: room.shop.query("SELECT count(*) FROM outbox.processor_claims") == [(0,)],
            within=450,
            explain=lambda: room.cluster.explain(room.namespace),
        )
