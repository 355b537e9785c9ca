"""Conflicts and claims: seen, decided, recorded."""

from __future__ import annotations

import pytest

from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_worker.postgres.progress import conflicts
from tests.integration.cli.conftest import Cli

WHY = ("--reason", "the script was right")


@pytest.fixture
def blocked(shop):
    """The row was moved ahead of what the owner expected: (conflict, expected, stored)."""
    pairs = shop.produce(5)
    shop.store(pairs[1])
    shop.connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_transaction_id = %s, last_processed_position = %s",
        (str(pairs[4].transaction_id), pairs[4].position),
    )
    return shop.refuse(pairs[1], pairs[4]), pairs[1], pairs[4]


def lease_is_granted(shop):
    """Whether a worker could work: an open conflict refuses every lease."""
    return shop.connection.execute(
        "SELECT acquired FROM outbox.acquire_lease('orders', 0, 'uid-orders', 'pod-b', gen_random_uuid(), '1 s')"
    ).fetchone()[0]


def test_an_open_conflict_is_listed(cli, blocked):
    number, expected, stored = blocked
    (found,) = cli.json("conflicts", "list", "--check", status=4)
    assert (found["id"], found["code"], found["open"]) == (number, 2, True)
    assert (found["expected"], found["stored"]) == (str(expected), str(stored))
    assert str(stored) in cli.run("conflicts", "list", "orders").stdout


def test_accepting_shows_what_it_means_and_lets_work_go_on(cli, shop, blocked):
    number, _, stored = blocked
    assert not lease_is_granted(shop)
    preview = cli.json("conflicts", "accept", str(number), "--dry-run")
    assert (preview["direction"], preview["messages"], preview["done"]) == ("forward", 3, False)
    done = cli.process("conflicts", "accept", str(number), "--pair", str(stored), "--yes", *WHY)
    assert done.returncode == 0, done.stderr
    assert "3 messages would be passed over, never handled" in done.stderr
    assert f"kubectl outbox accept orders -n shop --conflict {number}" in done.stderr, "nobody there looks by itself"
    ((act, _, after, reason, decided_by),) = shop.audit_log()
    assert (act, after, reason) == ("Accept", str(stored), f"conflict {number}")
    assert decided_by.endswith(": the script was right")
    assert cli.json("conflicts", "list", "--check") == []
    (past,) = cli.json("conflicts", "list", "--all")
    assert (past["open"], past["resolution"]) == (False, "Accept")
    assert lease_is_granted(shop)


def test_an_open_conflict_is_found_behind_later_refusals(cli, shop, blocked):
    _, expected, stored = blocked
    shop.connection.execute("UPDATE outbox.processor_conflicts SET recorded_at = recorded_at - interval '1 hour'")
    told = conflicts.Refusal(
        StoreAnswer.NOT_OWNER, expected, stored, expected, 1, "pod-a", "uid-orders", needs_person=False
    )
    conflicts.record_refusal(shop.connection, shop.key, told)
    (listed,) = cli.json("conflicts", "list", "--all", "--limit", "1", "--check", status=4)
    assert listed["code"] == 4


def test_a_conflict_of_another_processor_than_the_manifests_is_not_accepted(cli, shop, blocked, tmp_path):
    number, _, stored = blocked
    manifest = tmp_path / "invoices.yaml"
    manifest.write_text(
        "apiVersion: outbox-operator.dev/v1alpha1\nkind: OutboxProcessor\nmetadata: {name: invoices}\nspec:\n"
        "  source: {connection: {secretRef: {name: db}}}\n  target: {log: {}}\n"
    )
    done = cli.run("conflicts", "accept", str(number), "-f", str(manifest), "--pair", str(stored), "--yes", *WHY)
    assert done.returncode == 3
    assert f"conflict {number} is of processor orders, and the manifest of invoices" in done.stderr
    assert shop.audit_log() == []


def test_accepting_is_refused_without_the_pair_that_was_seen(cli, shop, blocked):
    number, expected, stored = blocked
    unseen = cli.run("conflicts", "accept", str(number), "--yes")
    another = cli.run("conflicts", "accept", str(number), "--pair", str(expected), "--yes")
    unknown = cli.run("conflicts", "accept", "4711", "--yes")
    assert (unseen.returncode, another.returncode, unknown.returncode) == (3, 3, 3)
    assert f"--pair {stored}" in unseen.stderr
    assert f"the stored pair is {stored}, not {expected}" in another.stderr
    assert "there is no conflict 4711" in unknown.stderr
    assert shop.audit_log() == []


def test_a_decided_conflict_is_not_decided_again(cli, shop, blocked):
    number, _, stored = blocked
    arguments = ("conflicts", "accept", str(number), "--pair", str(stored), "--yes")
    assert cli.run(*arguments).returncode == 0
    again = cli.run(*arguments)
    assert again.returncode == 3
    assert "does not wait for a person: Accept" in again.stderr
    assert len(shop.audit_log()) == 1


def test_a_rewind_decides_the_open_conflict(cli, shop, blocked):
    number, expected, _ = blocked
    unseen = cli.run("rewind", "orders", "--to", str(expected), "--yes", *WHY)
    wrong = cli.run("rewind", "orders", "--to", str(expected), "--conflict", "99", "--yes", *WHY)
    assert (unseen.returncode, wrong.returncode) == (3, 3)
    assert f"--conflict {number}" in unseen.stderr
    done = cli.run("rewind", "orders", "--to", str(expected), "--conflict", str(number), "--yes", *WHY)
    assert done.returncode == 0, done.stderr
    assert f"conflict {number} is decided by this" in done.stderr
    assert f"kubectl outbox rewind orders --to {expected} -n shop --conflict {number}" in done.stderr
    assert shop.stored() == expected
    assert cli.json("conflicts", "list") == []
    assert lease_is_granted(shop)


def test_a_deleted_row_can_only_be_rewound(cli, shop):
    pairs = shop.produce(3)
    shop.store(pairs[1])
    shop.connection.execute("DELETE FROM outbox.processor_checkpoints")
    number = shop.refuse(pairs[1], None, code=StoreAnswer.OLDER)
    refused = cli.run("conflicts", "accept", str(number), "--yes")
    assert refused.returncode == 3
    assert "there is no pair to accept" in refused.stderr
    arguments = ("skip-to", "orders", "--to", str(pairs[1]), "--conflict", str(number), "--yes", *WHY)
    assert cli.run(*arguments).returncode == 0
    assert shop.stored() == pairs[1]


def test_a_preview_of_a_rewind_counts_from_what_was_expected_where_the_row_is_gone(cli, shop):
    pairs = shop.produce(3)
    shop.store(pairs[2])
    shop.connection.execute("DELETE FROM outbox.processor_checkpoints")
    number = shop.refuse(pairs[2], None, code=StoreAnswer.OLDER)
    arguments = ("rewind", "orders", "--to", str(pairs[0]), "--conflict", str(number))
    found = cli.json(*arguments, "--dry-run")
    assert (found["messages"], found["direction"], found["from"]) == (2, "back", None)
    assert cli.json(*arguments, "--yes", *WHY)["messages"] == 2
    assert shop.stored() == pairs[0]


def test_claims_are_shown(cli, shop):
    shop.own(live=True)
    (found,) = cli.json("claim", "show")
    assert (found["cluster"], found["namespace"], found["name"]) == ("test", "shop", "orders")
    assert (found["pods"], found["vacatedAt"]) == (["pod-a"], None)
    assert "pod-a" in cli.run("claim", "show", "orders").stdout


def test_a_claim_is_released_by_force_and_recorded_in_the_audit_log(cli, shop):
    shop.own()
    looked = cli.run("claim", "release", "orders", "--dry-run")
    unforced = cli.run("claim", "release", "orders", "--yes", *WHY)
    assert (looked.returncode, unforced.returncode) == (0, 3)
    assert "--force" in unforced.stderr
    assert len(cli.json("claim", "show")) == 1
    done = cli.process("claim", "release", "orders", "--force", "--yes", "--reason", "the cluster is lost")
    assert done.returncode == 0, done.stderr
    assert cli.json("claim", "show") == []
    ((action, _, _, reason, _),) = shop.audit_log()
    assert (action, reason) == ("ReleaseClaim", "claim of test/shop/orders released by force: the cluster is lost")
    again = cli.run("claim", "release", "orders", "--force", "--yes", *WHY)
    assert again.returncode == 3
    assert "no resource holds the claim" in again.stderr


def test_releasing_a_live_claim_warns_and_ends_the_lease(cli, shop):
    epoch, token = shop.own(live=True)
    done = cli.run("claim", "release", "orders", "--force", "--yes", *WHY)
    assert done.returncode == 0, done.stderr
    assert "it is alive (pod-a)" in done.stderr
    answer = shop.connection.execute("SELECT outbox.renew_lease('orders', 0, %s, %s, '1 s')", (epoch, token)).fetchone()
    assert answer == (False,)


def test_who_may_not_write_acts_releases_nothing(database, shop):
    shop.own()
    admin = database.direct()
    admin.execute("GRANT USAGE ON SCHEMA outbox TO processor; GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO processor")
    admin.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA outbox TO processor")
    done = Cli(database.files("processor").directory).run("claim", "release", "orders", "--force", "--yes", *WHY)
    assert done.returncode == 1
    assert "permission denied for table audit_log" in done.stderr
    assert shop.connection.execute("SELECT count(*) FROM outbox.processor_claims").fetchone() == (1,)


def test_a_conflict_of_another_partition_is_its_own(cli, shop, blocked):
    number, expected, _ = blocked
    shop.connection.execute("UPDATE outbox.processor_conflicts SET partition = 1")
    states = {(row["partition"], row["state"]) for row in cli.json("status")}
    assert states == {(0, "Claimed"), (1, "Blocked")}
    done = cli.run("rewind", "orders", "--to", str(expected), "--conflict", str(number), "--yes", *WHY)
    assert done.returncode == 3
    assert shop.stored() != Checkpoint(expected.transaction_id, expected.position)
