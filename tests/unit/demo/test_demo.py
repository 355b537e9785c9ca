"""The demo's pure parts: what producers do is decided by the seed, and what it says is readable without a terminal."""

from __future__ import annotations

import io
import re
import threading
from collections import Counter
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, cast

import pytest
import yaml

from tests.tools.demo.cluster import Processor
from tests.tools.demo.install import CRD, NAMESPACES, find_foreign
from tests.tools.demo.place import ANALYTICS, CHECKOUT, MANIFESTS, read_place
from tests.tools.demo.producing.transactions import LARGE_BYTES, TYPES, Book, Kind, plan_transaction
from tests.tools.demo.progress import Progress
from tests.tools.demo.story import FIRST_MESSAGE_WITHIN, Story, judge_first
from tests.tools.demo.tracks import Tracks
from tests.tools.demo.waiting import DemoError, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.demo.producing.shop import Shop


def test_same_seed_gives_the_same_transactions() -> None:
    one, other = Random("1/3"), Random("1/3")
    assert [plan_transaction(one) for _ in range(50)] == [plan_transaction(other) for _ in range(50)]


def test_every_kind_of_transaction_occurs_and_open_ones_are_open_for_seconds() -> None:
    plans = [plan_transaction(random) for random in [Random(5)] for _ in range(3000)]
    assert set(Counter(plan.kind for plan in plans)) == set(Kind)
    assert min(plan.pause for plan in plans if plan.kind is Kind.OPEN) >= 1.5


def test_orders_get_their_messages_in_sequence_without_gaps() -> None:
    drafts = Book(2).draft(Random(1), 2000)
    last: dict[str, int] = {}
    for draft in drafts:
        assert draft.sequence == last.get(draft.key, 0) + 1
        assert draft.message_type == TYPES[draft.sequence - 1]
        last[draft.key] = draft.sequence
    assert len({draft.message_id for draft in drafts}) == 2000
    assert any(draft.large for draft in drafts)
    assert LARGE_BYTES > 8192


def test_what_is_rolled_back_leaves_the_book_as_it_was() -> None:
    book = Book(1)
    book.draft(Random(1), 30)
    kept = (dict(book.open), book.placed)
    book.copy().draft(Random(2), 30)
    assert (book.open, book.placed) == kept


def test_without_a_terminal_the_table_is_plain_lines() -> None:
    out = io.StringIO()
    progress = Progress(out, terminal=False)
    with progress.table(lambda: ["never drawn in so short a time"]), progress.step("something"):
        progress.say("first\nsecond", "somebody")
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert [line.partition("s] ")[2] for line in lines][:3] == [
        "something …",
        "somebody: first",
        "somebody: second",
    ]


def test_on_a_terminal_the_table_is_drawn_over_itself() -> None:
    out = io.StringIO()
    progress = Progress(out, terminal=True)
    drawn = threading.Event()

    def lines() -> list[str]:
        drawn.set()
        return ["a", "b"]

    with progress.table(lines):
        assert drawn.wait(10)
        wait_for("the table is drawn", lambda: "a\nb\n" in out.getvalue(), within=10, poll=0.01)
        progress.say("above")
    assert "\x1b[2F\x1b[J" in out.getvalue()


def test_a_table_that_cannot_be_made_this_time_is_made_the_next() -> None:
    out = io.StringIO()
    progress = Progress(out, terminal=True)
    looks = iter([True, False, False])

    def lines() -> list[str]:
        if next(looks, False):
            raise DemoError("the API server is busy")
        return ["a table"]

    with progress.table(lines):
        wait_for("the table is drawn", lambda: "a table\n" in out.getvalue(), within=10, poll=0.01)
    assert "(no table this time: the API server is busy)" in out.getvalue()


def test_waiting_in_vain_says_for_what() -> None:
    with pytest.raises(DemoError, match="in vain: the sky to fall"):
        wait_for("the sky to fall", lambda: None, within=0.05, poll=0.01)


def test_waiting_returns_what_was_found_even_if_it_is_zero() -> None:
    assert wait_for("a number", lambda: 0, within=1)[0] == 0


class FineShop:
    def check(self) -> None:
        """The producers run."""


def test_a_scene_that_fails_stops_its_track_and_is_told() -> None:
    played = []

    def fails() -> None:
        raise DemoError("no")

    tracks = Tracks({"one": [lambda: played.append(1), fails, lambda: played.append(2)]})
    with pytest.raises(DemoError, match="track one: no"):
        tracks.join(cast("Shop", FineShop()))
    assert played == [1]


def test_conditions_of_an_absent_resource_are_empty() -> None:
    processor = Processor({})
    assert not processor.exists()
    assert processor.condition("Ready") == {}
    assert processor.describe("Ready") == "Ready=absent : "


def release(namespace: str | None) -> dict[str, object]:
    annotations = {"meta.helm.sh/release-namespace": namespace} if namespace else None
    return {"metadata": {"name": CRD.rpartition("/")[2], "annotations": annotations}}


def test_what_an_earlier_demo_left_is_its_own() -> None:
    left = {
        found["metadata"]["name"]: found for found in yaml.safe_load_all((MANIFESTS / "namespaces.yaml").read_text())
    }
    assert set(left) == set(NAMESPACES)
    assert find_foreign(left, release("outbox-system")) == []
    assert find_foreign(dict.fromkeys(NAMESPACES), None) == []


@pytest.mark.parametrize(
    ("namespaces", "crd", "named"),
    [
        pytest.param(
            {"outbox-system": {"metadata": {}}}, None, "namespace outbox-system", id="an operator installed by the docs"
        ),
        pytest.param(
            {"outbox-system": None}, release("platform"), "the CRD outboxprocessors", id="a release elsewhere"
        ),
        pytest.param({"outbox-system": None}, release(None), "the CRD outboxprocessors", id="a CRD applied by hand"),
    ],
)
def test_what_somebody_else_installed_is_named(namespaces, crd, named) -> None:
    (foreign,) = find_foreign(namespaces, crd)
    assert named in foreign


@pytest.mark.parametrize(
    ("seconds", "local", "said", "late"),
    [
        (42.0, True, "42.0 s (at most 60 s)", False),
        (60.4, True, "60.4 s (at most 60 s: MISSED)", True),
        (95.0, False, "95.0 s (not judged: images may be fetched first)", False),
    ],
)
def test_a_start_is_judged_by_one_limit_that_is_named_where_it_is_printed(
    seconds: float, local: bool, said: str, late: bool
) -> None:
    assert judge_first(FIRST_MESSAGE_WITHIN[ANALYTICS], seconds, local=local) == (said, late)


NO_CLUSTER = """
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
users: [{name: none, user: {}}]
current-context: none
"""


def test_a_missed_limit_is_a_failure_of_the_demo(tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text(NO_CLUSTER)
    place = replace(read_place(), kubeconfig=tmp_path / "kubeconfig")
    story = Story(place, Progress(io.StringIO(), terminal=False), 1, 1.0, 1)
    story._missed.append("late")
    assert story.judge([]) == ["late"]
    assert story.judge(["lost"]) == ["lost", "late"]


def test_the_readme_names_the_same_limit() -> None:
    text = (CHECKOUT / "README.md").read_text()
    assert f"at most {FIRST_MESSAGE_WITHIN[ANALYTICS]:.0f} s" in text


def test_scenes_and_accounts_have_names_and_no_numbers() -> None:
    sources = "".join(path.read_text() for path in sorted((CHECKOUT / "tests" / "tools" / "demo").rglob("*.py")))
    titles = re.findall(r'Scene\(demo, "([^"]*)"', sources)
    assert len(titles) > 8
    assert not [title for title in titles if re.search(r"[(\d]", title)]
    assert not re.search(r'f"\([a-f]\) ', sources)
