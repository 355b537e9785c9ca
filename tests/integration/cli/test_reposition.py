"""Rewind and skip-to: a preview that counts, a question, an entry in the audit log; refused where it would do harm."""

from __future__ import annotations

import re
import threading
from datetime import timedelta

import pytest

from tests.integration.cli.conftest import Cli, pair
from tests.support.servers.postgres import wait_until

WHY = ("--reason", "invoices were wrong")


@pytest.fixture
def moved(shop):
    """Three orders and two payments, all handled but the last one."""
    pairs = [*shop.produce(3), *shop.produce(2, "OrderPaid")]
    shop.store(pairs[3])
    return pairs


def test_a_dry_run_counts_by_type_and_changes_nothing(cli, shop, moved):
    found = cli.json("rewind", "orders", "--to", str(moved[0]), "--dry-run")
    assert (found["from"], found["to"], found["direction"]) == (str(moved[3]), str(moved[0]), "back")
    assert (found["messages"], found["byType"]) == (3, {"OrderPlaced": 2, "OrderPaid": 1})
    assert (found["done"], found["atLeast"], found["ownerLive"]) == (False, False, False)
    said = cli.run("rewind", "orders", "--to", str(moved[0]), "--dry-run").stdout
    assert "3 messages would be handled again (2 OrderPlaced, 1 OrderPaid)" in said
    assert (shop.stored(), shop.audit_log()) == (moved[3], [])


def test_a_rewind_is_recorded_in_the_audit_log(cli, shop, moved):
    found = cli.json("rewind", "orders", "--to", str(moved[0]), "--yes", *WHY)
    assert found["done"] is True
    assert shop.stored() == moved[0]
    ((act, before, after, reason, decided_by),) = shop.audit_log()
    assert (act, before, after) == ("Rewind", str(moved[3]), str(moved[0]))
    assert reason == "rewind: invoices were wrong"
    assert re.fullmatch(r".+@.+", decided_by)
    (seen,) = cli.json("audit", "orders")
    assert (seen["from"], seen["to"], seen["reason"]) == (before, after, reason)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("rewind", "orders", "--to-position", "-1", "--dry-run"), "position: ", id="position"),
        pytest.param(("status", "--schema", "x" * 64), "schemaName: ", id="schema"),
    ],
)
def test_a_value_that_cannot_be_is_answered_in_a_sentence(cli, moved, arguments, said):
    done = cli.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"outbox: {said}should ")


def test_a_skip_is_recorded_in_the_audit_log(cli, shop, moved):
    preview = cli.json("skip-to", "orders", "--to", str(moved[4]), "--dry-run")
    assert (preview["direction"], preview["byType"]) == ("forward", {"OrderPaid": 1})
    done = cli.process("skip-to", "orders", "--to", str(moved[4]), "--yes", *WHY)
    assert done.returncode == 0, done.stderr
    assert "1 message would be passed over, never handled" in done.stderr
    assert shop.stored() == moved[4]
    assert shop.audit_log()[0][3] == "skip-to: invoices were wrong"


def test_places_by_position_time_beginning_and_end(cli, shop, moved):
    def target(*arguments):
        return cli.json(*arguments, "--dry-run")["to"]

    assert target("rewind", "orders", "--to-beginning") == "0:0"
    at = moved[1]
    assert target("rewind", "orders", "--to-position", str(at.position)) == f"{at.transaction_id}:{at.position - 1}"
    row = shop.connection.execute(
        "SELECT scheduled FROM outbox.messages WHERE position = %s", (at.position,)
    ).fetchone()
    when = (row[0] - timedelta(microseconds=1)).isoformat()
    assert target("rewind", "orders", "--to-time", when) == f"{at.transaction_id}:{at.position - 1}"
    end = pair(target("skip-to", "orders", "--to-end"))
    assert end > moved[4]
    assert cli.json("skip-to", "orders", "--to-end", "--dry-run")["messages"] == 1


def test_refused_while_an_owner_is_live(cli, shop, moved):
    shop.own(live=True)
    looked = cli.run("rewind", "orders", "--to-beginning", "--dry-run")
    done = cli.run("rewind", "orders", "--to-beginning", "--yes", *WHY)
    assert looked.returncode == 0
    assert "now it would be refused" in looked.stderr
    assert done.returncode == 3
    assert "pod pod-a is the live owner" in done.stderr
    assert "kubectl outbox pause" in done.stderr
    assert (shop.stored(), shop.audit_log()) == (moved[3], [])


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        pytest.param(("rewind", "orders", "--to-beginning", "--yes"), 2, "--reason is missing", id="no reason"),
        pytest.param(("rewind", "orders", "--to-beginning", *WHY), 3, "say it with --yes", id="nobody to ask"),
        pytest.param(("rewind", "orders", "--to", "99", *WHY), 2, "not a checkpoint", id="half a pair"),
        pytest.param(("rewind", "--to-beginning", *WHY), 2, "which processor?", id="no processor"),
        pytest.param(("rewind", "order", "--to-beginning", *WHY), 3, "knows no processor order", id="a typing error"),
        pytest.param(("rewind", "orders", "--partition", "7", "--to-beginning", *WHY), 3, "no partition 7", id="part"),
        pytest.param(("skip-to", "orders", "--to", "4:1", "--yes", *WHY), 3, "that is `outbox rewind`", id="backward"),
        pytest.param(("skip-to", "orders", "--to", "99999999:1", "--yes", *WHY), 3, "is not settled", id="unsettled"),
    ],
)
def test_refused_with_the_reason(cli, shop, moved, arguments, status, said):
    done = cli.run(*arguments)
    assert done.returncode == status
    assert said in done.stderr
    assert (shop.stored(), shop.audit_log()) == (moved[3], [])


def test_a_rewind_forward_and_a_move_to_the_same_place_are_refused(cli, moved):
    forward = cli.run("rewind", "orders", "--to", str(moved[4]), "--yes", *WHY)
    same = cli.run("rewind", "orders", "--to", str(moved[3]), "--yes", *WHY)
    assert (forward.returncode, same.returncode) == (3, 3)
    assert "that is `outbox skip-to`" in forward.stderr
    assert "already" in same.stderr


def test_what_is_in_flight_is_never_passed_over(cli, shop, moved):
    """A pair at or above an open transaction would lose what that commits: the end is cut at the bound."""
    writer = shop.database.direct(autocommit=False)
    writer.execute("INSERT INTO outbox.messages (message_type, data) VALUES ('Late', '{}')")
    (later,) = shop.produce(1)
    refused = cli.run("skip-to", "orders", "--to", str(later), "--yes", *WHY)
    assert refused.returncode == 3
    assert "is not settled" in refused.stderr
    assert cli.run("skip-to", "orders", "--to-end", "--yes", *WHY).returncode == 0
    writer.commit()
    rows = shop.connection.execute(
        "SELECT message_type FROM outbox.messages m, outbox.processor_checkpoints c "
        "WHERE (m.transaction_id, m.position) > (c.last_processed_transaction_id, c.last_processed_position) "
        "ORDER BY m.transaction_id, m.position"
    ).fetchall()
    assert rows == [("Late",), ("OrderPlaced",)]


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 3), ("", 3)], ids=["yes", "no", "nothing"])
def test_it_asks_at_a_terminal(cli, shop, moved, answer, status):
    returned, _, shown = cli.at_a_terminal("rewind", "orders", "--to-beginning", *WHY, answer=answer)
    assert returned == status
    assert "4 messages would be handled again (3 OrderPlaced, 1 OrderPaid)" in shown
    assert "Move the checkpoint? [y/N]" in shown
    assert (shop.stored() == moved[3]) is (status != 0)


def test_somebody_who_worked_during_the_question_is_noticed(cli, shop, moved):
    """The preview was of another move: everything is rolled back."""
    lock = shop.database.direct(autocommit=False)
    lock.execute("SELECT 1 FROM outbox.processor_leases FOR UPDATE")
    done = []
    waiting = threading.Thread(
        target=lambda: done.append(cli.process("rewind", "orders", "--to-beginning", "--yes", *WHY))
    )
    waiting.start()
    wait_until(
        lambda: shop.connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-cli' AND wait_event_type = 'Lock'"
        ).fetchone() == (1,),
        "the rewind waits for the lease's row",
    )  # fmt: skip
    lock.execute("UPDATE outbox.processor_checkpoints SET last_processed_position = last_processed_position + 1")
    lock.commit()
    waiting.join()
    assert done[0].returncode == 3
    assert "a worker was active meanwhile" in done[0].stderr
    assert shop.audit_log() == []
    assert shop.stored() == pair(f"{moved[3].transaction_id}:{moved[3].position + 1}")


@pytest.mark.parametrize("meanwhile", ["another partition is rewound", "a message is given up"])
def test_another_decision_at_the_same_moment_is_not_taken_for_a_worker(cli, shop, moved, meanwhile):
    """It is recorded between the move and the look at what was moved."""
    shop.connection.execute("INSERT INTO outbox.processor_leases (processor_id, partition) VALUES ('orders', 1)")
    shop.connection.execute(
        "CREATE FUNCTION wait_here() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$; "
        "CREATE TRIGGER wait_here AFTER INSERT ON outbox.audit_log "
        "FOR EACH ROW WHEN (NEW.reason = 'rewind: invoices were wrong') EXECUTE FUNCTION wait_here()"
    )
    lock = shop.database.direct(autocommit=False)
    lock.execute("SELECT pg_advisory_xact_lock(7)")
    done = []
    moving = threading.Thread(
        target=lambda: done.append(cli.process("rewind", "orders", "--to-beginning", "--partition", "0", "--yes", *WHY))
    )
    moving.start()
    wait_until(
        lambda: shop.connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-cli' AND wait_event = 'advisory'"
        ).fetchone() == (1,),
        "the rewind has moved and recorded it",
    )  # fmt: skip
    if meanwhile == "a message is given up":
        other = cli.run("dead-letters", "add", "orders", "--at", str(moved[4]), "--reason", "it stopped")
        assert other.returncode == 0, other.stderr
    else:
        shop.connection.execute(
            "SELECT outbox.rewind_processor_checkpoint('orders', 1, '0', 0, 'the other partition', 'a person')"
        )
    lock.commit()
    moving.join()
    assert done[0].returncode == 0, done[0].stderr
    assert shop.stored() == pair("0:0")


def test_a_processor_without_a_checkpoint_is_not_moved(cli, shop):
    shop.own()
    done = cli.run("rewind", "orders", "--to-beginning", "--yes", *WHY)
    assert done.returncode == 3
    assert "has no checkpoint yet" in done.stderr


@pytest.mark.parametrize("command", [("rewind", "--to-beginning"), ("skip-to", "--to-end")], ids=["back", "forward"])
@pytest.mark.parametrize("more", [("--dry-run",), ("--yes", *WHY)], ids=["dry run", "act"])
def test_a_checkpoint_that_was_deleted_is_a_conflict_first(cli, shop, moved, command, more):
    """No worker has run since: startFrom does not decide, for the worker that comes next records a conflict."""
    shop.connection.execute("DELETE FROM outbox.processor_checkpoints")
    verb, where = command
    done = cli.run(verb, "orders", where, *more)
    assert done.returncode == 3
    assert "row of orders partition 0 is gone: start the processor, which records that as a conflict" in done.stderr
    assert shop.audit_log() == []


def test_a_preview_counts_up_to_a_cap(cli, shop, moved):
    found = cli.json("rewind", "orders", "--to-beginning", "--dry-run", "--count-at-most", "2")
    assert (found["messages"], found["atLeast"]) == (3, True)
    assert (
        "3 or more messages"
        in cli.run("rewind", "orders", "--to-beginning", "--dry-run", "--count-at-most", "2").stdout
    )


def test_a_preview_counts_many_pages(cli, shop):
    shop.connection.execute(
        "INSERT INTO outbox.messages (message_type, data) "
        "SELECT 'Kind' || n % 3, '{}' FROM generate_series(1, 120000) n"
    )
    (last,) = shop.produce(1)
    shop.store(last)
    found = cli.json("rewind", "orders", "--to-beginning", "--dry-run")
    assert found["messages"] == 120_001
    assert found["byType"] == {"Kind0": 40_000, "Kind1": 40_000, "Kind2": 40_000, "OrderPlaced": 1}
    _, _, shown = cli.at_a_terminal("rewind", "orders", "--to-beginning", "--dry-run", answer="")
    assert "messages counted: 50,000" in shown


def test_without_rights_nothing_is_moved(database, shop, moved):
    admin = database.direct()
    admin.execute("GRANT USAGE ON SCHEMA outbox TO stranger; GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO stranger")
    done = Cli(database.files("stranger").directory).run("rewind", "orders", "--to-beginning", "--yes", *WHY)
    assert done.returncode == 1
    assert "permission denied for function" in done.stderr
    assert shop.stored() == moved[3]
