"""Thousands of random histories: the SQL and a model written from the table answer the same, call by call.

A history is a list of calls and of things that happen (claims, takeovers, lapses, edits by hand) to one processor. Many
histories run in one statement, in which every call sees what those before it did; so thousands take seconds.
"""

from __future__ import annotations

import os
import random
from uuid import UUID

import pytest

from tests.support.database.contract import ERROR, NOTHING, Model

HISTORIES = 4_000
CALLS = 12
BATCH = 250
# Small, so that histories meet; with the ends of the ranges, and positions that fall while transactions rise.
TRANSACTION_IDS = [0, 3, 4, 5, 2**63 - 1, 2**63, 2**64 - 1]
POSITIONS = [-(2**63), -1, 0, 1, 2, 2**63 - 1]
TOKENS = [str(UUID(int=n)) for n in (1, 2)]

STEP = """
CREATE FUNCTION pg_temp.step(kind text, p text, n_t text, n_p bigint, e_t text, e_p bigint, epoch bigint, token text)
RETURNS int LANGUAGE plpgsql AS $$
BEGIN
    CASE kind
    WHEN 'store' THEN
        RETURN outbox.store_processor_checkpoint(p, 0, n_t::xid8, n_p, e_t::xid8, e_p, epoch, token::uuid);
    WHEN 'claim' THEN
        RETURN (SELECT granted::int FROM outbox.claim_processor(p, 'c', 'n', 'a', 'u'));
    WHEN 'release' THEN
        RETURN outbox.release_claim(p, 'u')::int;
    WHEN 'acquire' THEN
        RETURN (SELECT CASE WHEN acquired THEN a.epoch ELSE 0 END
                FROM outbox.acquire_lease(p, 0, 'u', 'pod', token::uuid, '1 hour') AS a);
    WHEN 'renew' THEN
        RETURN outbox.renew_lease(p, 0, epoch, token::uuid, '1 hour')::int;
    WHEN 'lapse' THEN
        UPDATE outbox.processor_leases SET expires_at = clock_timestamp() WHERE processor_id = p;
    WHEN 'edit' THEN
        INSERT INTO outbox.processor_checkpoints VALUES (p, 0, n_t::xid8, n_p)
        ON CONFLICT (processor_id, partition) DO UPDATE
        SET last_processed_transaction_id = n_t::xid8, last_processed_position = n_p;
    WHEN 'delete' THEN
        DELETE FROM outbox.processor_checkpoints WHERE processor_id = p;
    END CASE;
    RETURN NULL;
EXCEPTION WHEN invalid_parameter_value OR null_value_not_allowed THEN
    RETURN -1;
END $$
"""
RUN = """
SELECT pg_temp.step(s.kind, s.p, s.n_t, s.n_p, s.e_t, s.e_p, s.epoch, s.token)
FROM unnest(%s::text[], %s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::bigint[], %s::text[])
     WITH ORDINALITY AS s (kind, p, n_t, n_p, e_t, e_p, epoch, token, n)
ORDER BY s.n
"""
ROWS = """
SELECT processor_id, last_processed_transaction_id::text, last_processed_position FROM outbox.processor_checkpoints
"""


def random_pair(rng):
    return rng.choice(TRANSACTION_IDS), rng.choice(POSITIONS)


def random_half(rng):
    """Mostly a pair, sometimes half of one."""
    whole = random_pair(rng)
    return rng.choice([(whole[0], None), (None, whole[1]), (None, None)]) if rng.random() < 0.05 else whole


def random_owner(rng, model):
    choice = rng.random()
    if choice < 0.55 and model.live:
        return model.live
    if choice < 0.8:
        return None, None
    return rng.choice([(model.epoch, None), (None, TOKENS[0]), (rng.randrange(4), rng.choice(TOKENS))])


def play(rng, model):
    """One random step, carried out by the model: what to run, and what must be answered."""
    kind = rng.choices(
        ["store", "claim", "release", "acquire", "renew", "lapse", "edit", "delete"], [60, 8, 3, 10, 4, 3, 5, 2]
    )[0]
    new, expected, owner, answer = NOTHING, NOTHING, (None, None), None
    if kind == "store":
        new, owner = random_half(rng), random_owner(rng, model)
        known = model.row if model.row is not None and rng.random() < 0.6 else random_half(rng)
        expected = NOTHING if rng.random() < 0.2 else known
        answer = model.store(new, expected, owner)
    elif kind == "claim":
        model.claimed, answer = True, 1
    elif kind == "release":
        answer, model.claimed = int(model.claimed), False
        model.live = None if answer else model.live
    elif kind == "acquire":
        owner = (None, rng.choice(TOKENS))
        answer = 0
        if model.claimed and (model.live is None or model.live[1] == owner[1]):
            model.epoch = answer = model.epoch + 1
            model.live = (model.epoch, owner[1])
    elif kind == "renew":
        owner = (rng.randrange(4), rng.choice(TOKENS))
        answer = int(owner == model.live)
    elif kind == "lapse":
        model.live = None
    elif kind == "edit":
        new = model.row = random_pair(rng)
    else:
        model.row = None
    return (kind, new, expected, owner), answer


def write_history(rng, processor_id):
    model = Model()
    steps = [play(rng, model) for _ in range(rng.randint(1, CALLS))]
    return processor_id, model, steps


def run_histories(connection, histories):
    """All steps of all histories, in order; returns the answers as flat list."""
    flat = [
        (kind, name, *(None if t is None else str(t) for t in (new[0],)), new[1],
         None if expected[0] is None else str(expected[0]), expected[1], *owner)
        for name, _, steps in histories for (kind, new, expected, owner), _ in steps
    ]  # fmt: skip
    columns = [list(column) for column in zip(*flat, strict=True)]
    return [row[0] for row in connection.execute(RUN, columns).fetchall()]


def find_difference(histories, answers):
    """The first history whose answers differ, up to the step that differs; None if all agree."""
    remaining = iter(answers)
    for name, _, steps in histories:
        said = [next(remaining) for _ in steps]
        for number, ((step, wanted), got) in enumerate(zip(steps, said, strict=True)):
            if wanted != got:
                return name, [*steps[:number], (step, f"the model says {wanted}, SQL says {got}")]
    return None


@pytest.fixture
def seed():
    return int(os.environ.get("OUTBOX_SEED", random.SystemRandom().randrange(2**32)))


def test_the_sql_agrees_with_the_model(each_database, seed):
    print(f"OUTBOX_SEED={seed}")
    rng = random.Random(seed)
    connection = each_database.direct()
    connection.execute(STEP)
    answers_seen = set()
    for start in range(0, HISTORIES // 4, BATCH):
        histories = [write_history(rng, f"p{start + n}") for n in range(BATCH)]
        answers = run_histories(connection, histories)

        assert find_difference(histories, answers) is None, f"OUTBOX_SEED={seed}"

        rows = {name: (int(t), p) for name, t, p in connection.execute(ROWS).fetchall()}
        unowned_calls = connection.execute(
            "SELECT p, outbox.unowned_calls(p) FROM unnest(%s::text[]) AS p", ([name for name, _, _ in histories],)
        ).fetchall()
        assert {name: rows.get(name) for name, _, _ in histories} == {name: m.row for name, m, _ in histories}
        assert dict(unowned_calls) == {name: model.unowned_calls for name, model, _ in histories}
        answers_seen |= {a for (_, _, steps) in histories for (step, a) in steps if step[0] == "store"}
    assert answers_seen == {ERROR, 0, 1, 2, 3, 4}


FAULTS = [
    pytest.param(
        "(v_stored.last_processed_transaction_id, v_stored.last_processed_position)\n"
        "             >= (p_expected_transaction_id, p_expected_position)",
        "v_stored.last_processed_position >= p_expected_position",
        id="positions compared alone",
    ),
    pytest.param("p_expected_position IS NULL\n          OR ", "", id="an expected NULL never answers 2"),
    pytest.param("RETURN 3;  -- step 5\n        END IF;", "RETURN 2; END IF;", id="no row answered with 2"),
    pytest.param("THEN 0 ELSE 2 END;  -- step 3", "THEN 1 ELSE 2 END;", id="the stored pair stored again"),
    pytest.param(
        "IF refuses_unowned_caller(p_processor_id, p_partition) THEN", "IF false THEN", id="unowned_calls let in"
    ),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_the_comparison_finds_a_planted_fault(database, right, wrong):
    connection = database.direct()
    connection.execute(STEP)
    row = connection.execute(
        "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = 'store_checkpoint'"
    ).fetchone()
    assert right in row[0]
    connection.execute(row[0].replace(right, wrong))
    rng = random.Random(1)
    histories = [write_history(rng, f"p{n}") for n in range(BATCH)]

    assert find_difference(histories, run_histories(connection, histories)) is not None
