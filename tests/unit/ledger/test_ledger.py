"""The ledger finds exactly what is wrong, in lists and in sums, and shares no code with the product."""

from __future__ import annotations

import ast
from pathlib import Path
from random import Random
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tools.ledger.account import Handled, Order, compare, compare_sums
from tests.tools.ledger.commitlog import CommitLog, Committed, check_commit_log, read_commit_logs
from tests.tools.ledger.plant import check_list, check_sums, plant_duplicate, plant_loss, plant_swap
from tests.tools.ledger.table import format_accounts
from tests.tools.ledger.targets import read_parquet

LEDGER = Path(__file__).resolve().parents[2] / "tools" / "ledger"
STANDARD = {"account", "amqp", "commitlog", "history", "kafka", "plant", "table", "targets"}


def make_messages(count: int, keys: int = 7) -> list[Committed]:
    random = Random(count)
    sequences: dict[str, int] = {}
    messages = []
    for number in range(count):
        key = f"order-{random.randrange(keys)}"
        sequences[key] = sequences.get(key, 0) + 1
        pair = (1000 + number // 3, 5000 - number)
        minute = 60 * (number // 10)
        identity = str(UUID(int=random.getrandbits(128)))
        messages.append(Committed(identity, pair, key, sequences[key], random.randrange(1, 999), minute, 0))
    # Positions run backwards across transactions, and forwards in each: the order is that of the pair, never of half.
    return sorted(messages, key=lambda message: message.pair)


def renumbered(messages: list[Committed]) -> list[Committed]:
    sequences: dict[str, int] = {}
    result = []
    for m in messages:
        sequences[m.key] = sequences.get(m.key, 0) + 1
        result.append(Committed(m.message_id, m.pair, m.key, sequences[m.key], m.cents, m.minute, m.producer))
    return result


@pytest.fixture
def produced() -> list[Committed]:
    return renumbered(make_messages(100))


@pytest.fixture
def handled(produced) -> list[Handled]:
    return [Handled(m.message_id, m.key, m.sequence, m.cents) for m in produced]


def test_ledger_imports_nothing_of_the_product() -> None:
    imported = set()
    for path in LEDGER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
    assert [name for name in imported if name.startswith("outbox")] == []
    assert {name for name in imported if name.startswith("tests")} <= {
        f"tests.tools.ledger.{name}" for name in STANDARD
    }


def test_true_target_gets_a_clean_account(produced, handled) -> None:
    account = compare("all", produced, handled)
    assert account.is_exact()
    assert (account.produced, account.handled, account.findings) == (100, 100, ())


@pytest.mark.parametrize(
    ("plant", "counts"),
    [
        pytest.param(plant_loss, (1, 0, 0), id="one message lost"),
        pytest.param(plant_duplicate, (0, 1, 0), id="one message doubled"),
        pytest.param(plant_swap, (0, 0, 1), id="two neighbours exchanged"),
    ],
)
@pytest.mark.parametrize("seed", range(20))
def test_each_planted_fault_is_found_and_nothing_else(plant, counts, seed, produced, handled) -> None:
    account = compare("spoiled", produced, plant(handled, Random(seed)))
    assert (account.lost, account.duplicated, account.out_of_order) == counts
    assert account.findings
    assert not account.is_exact()


def test_a_duplicate_is_at_least_once_and_a_loss_is_not(produced, handled) -> None:
    assert compare("doubled", produced, [*handled, handled[3]]).is_at_least_once()
    assert not compare("lost", produced, handled[:-1]).is_at_least_once()


def test_a_message_that_was_rolled_back_is_foreign(produced, handled) -> None:
    account = compare("foreign", produced, [*handled, Handled("x", "order-0", 99, 1)])
    assert (account.foreign, account.duplicated, account.lost) == (1, 0, 0)
    assert not account.is_at_least_once()


def test_a_second_delivery_with_another_id_is_a_duplicate_and_renamed(produced, handled) -> None:
    first = handled[0]
    account = compare("renamed", produced, [*handled, Handled("other", first.key, first.sequence)])
    assert (account.duplicated, account.renamed) == (1, 1)


def test_order_is_that_of_the_pair_and_not_of_the_position(produced, handled) -> None:
    by_position = [h for _, h in sorted(zip(produced, handled, strict=True), key=lambda both: both[0].pair[1])]
    assert compare("by position", produced, by_position).out_of_order


def test_self_test_finds_all_in_a_true_list_and_in_one_with_duplicates(produced, handled) -> None:
    assert check_list(produced, handled, Random(1)) == []
    assert check_list(produced, [*handled[:40], *handled[20:]], Random(2)) == []
    assert check_list(produced, handled[::-1], Random(3), order=Order.NONE) == []


def test_self_test_says_no_to_a_ledger_that_overlooks(produced, handled, request) -> None:
    # A list whose keys nobody committed: everything is foreign, so a planted loss cannot show as one.
    blind = [Handled(h.message_id, "nobody", number) for number, h in enumerate(handled)]
    assert any("planted one loss" in line for line in check_list(produced, blind, Random(4)))


def true_sums(produced: list[Committed], by: str) -> dict[object, tuple[int, int]]:
    sums: dict[object, tuple[int, int]] = {}
    for message in produced:
        count, cents = sums.get(getattr(message, by), (0, 0))
        sums[getattr(message, by)] = (count + 1, cents + message.cents)
    return sums


@pytest.mark.parametrize("by", ["minute", "key"])
def test_sums_are_compared_group_by_group(by, produced) -> None:
    sums = true_sums(produced, by)
    assert compare_sums("true", produced, sums, by=by).is_exact()
    one, other = list(sums)[:2]
    sums[one] = (sums[one][0] - 2, sums[one][1])
    sums[other] = (sums[other][0] + 2, sums[other][1])
    account = compare_sums("shifted", produced, sums, by=by)
    assert (account.lost, account.duplicated, account.out_of_order) == (2, 2, None)


def test_right_count_with_wrong_amount_is_one_message_in_anothers_place(produced) -> None:
    sums = true_sums(produced, "minute")
    sums[0] = (sums[0][0], sums[0][1] + 1)
    account = compare_sums("amount", produced, sums)
    assert (account.lost, account.duplicated) == (1, 1)


def test_group_that_nobody_committed_and_group_that_is_missing_are_found(produced) -> None:
    sums = true_sums(produced, "minute")
    count = sums.pop(0)[0]
    account = compare_sums("moved", produced, {**sums, 999_960: (1, 5)})
    assert (account.lost, account.duplicated) == (count, 1)


def test_self_test_of_sums_finds_all(produced) -> None:
    assert check_sums(produced, true_sums(produced, "minute")) == []


def test_commit_log_is_read_back_in_pair_order_over_all_producers(tmp_path, produced) -> None:
    for producer in range(2):
        log = CommitLog(tmp_path / f"{producer}.jsonl", producer)
        for transaction_id in sorted({m.pair[0] for m in produced}):
            own = [m for m in produced if m.pair[0] == transaction_id and transaction_id % 2 == producer]
            if own:
                log.append(transaction_id, own)
        log.close()
    read = read_commit_logs(tmp_path)
    assert [(m.message_id, m.pair, m.key, m.sequence, m.cents, m.minute) for m in read] == [
        (m.message_id, m.pair, m.key, m.sequence, m.cents, m.minute) for m in produced
    ]


def test_line_cut_off_by_a_kill_is_not_believed(tmp_path, produced) -> None:
    log = CommitLog(tmp_path / "0.jsonl", 0)
    log.append(produced[0].pair[0], produced[:1])
    log.close()
    with (tmp_path / "0.jsonl").open("a") as file:
        file.write('{"producer":0,"transaction":"9","messages":[["x",1,"ord')
    assert [m.message_id for m in read_commit_logs(tmp_path)] == [produced[0].message_id]


def test_commit_log_that_contradicts_itself_is_refused(produced) -> None:
    with pytest.raises(ValueError, match="twice"):
        check_commit_log([produced[0], produced[0]])
    later = next(m for m in produced if m.sequence == 2)
    with pytest.raises(ValueError, match="jumps from 0 to 2"):
        check_commit_log([later])


def test_parquet_rows_are_read_and_what_spark_does_not_see_is_not(tmp_path, handled) -> None:
    columns = {
        "message_id": [h.message_id for h in handled],
        "order_key": [h.key for h in handled],
        "order_sequence": [h.sequence for h in handled],
        "cents": [h.cents for h in handled],
        "note": ["n"] * len(handled),
    }
    # A folder above the directory says nothing about what is in it.
    directory = tmp_path / "_copy"
    for name in ("part-1.parquet", ".part-2.parquet", "_staged.parquet", "_outbox/orders/1-a/part-3.parquet"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), directory / name)
    assert read_parquet(directory) == handled
    (directory / "part-1.parquet").unlink()
    assert read_parquet(directory) == [], "committed and never moved into sight is lost to a reader"


def test_table_is_aligned_and_says_where_there_is_no_order(produced, handled) -> None:
    lines = format_accounts(
        [compare("orders", produced, handled), compare("parquet", produced, handled, order=Order.NONE)]
    )
    assert lines[2].split() == ["orders", "100", "100", "0", "0", "0"]
    assert lines[3].split() == ["parquet", "100", "100", "0", "0", "-"]
    assert len({len(line) for line in lines}) == 1
