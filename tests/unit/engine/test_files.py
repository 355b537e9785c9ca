"""Files that appear with their checkpoint: names, moving, and what is never done."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_core.errors import PermanentError
from outbox_spark.writing.files import PendingFile, file_uri, hidden_directory, reveal, safe_name, sweep_hidden


def pending(path, text: str = "rows") -> PendingFile:
    hidden = hidden_directory(path, "orders", 3)
    hidden.mkdir(parents=True)
    (hidden / "part-0.parquet").write_text(text)
    return PendingFile(hidden / "part-0.parquet", path / "orders-1.parquet", 1)


def visible(path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(("_", ".")))


def test_readers_see_nothing_before_and_the_file_after(tmp_path):
    file = pending(tmp_path)
    assert visible(tmp_path) == []
    reveal([file])
    assert visible(tmp_path) == ["orders-1.parquet"]
    assert not file.hidden.parent.exists()


def test_moving_again_after_a_crash_changes_nothing(tmp_path):
    file = pending(tmp_path)
    reveal([file])
    reveal([file])
    assert (tmp_path / "orders-1.parquet").read_text() == "rows"


def test_a_file_that_is_there_is_never_overwritten(tmp_path):
    file = pending(tmp_path, "other rows")
    file.final.write_text("rows")
    reveal([file])
    assert file.final.read_text() == "rows"


def test_a_file_that_the_volume_lost_is_said_and_not_passed_over(tmp_path):
    file = pending(tmp_path)
    file.hidden.unlink()
    with pytest.raises(PermanentError, match="restore the volume"):
        reveal([file])


def test_what_earlier_queries_left_is_swept_and_nothing_of_a_later_owner(tmp_path):
    earlier = [hidden_directory(tmp_path, "orders", epoch) for epoch in (1, 2, 3)]
    later, foreign = hidden_directory(tmp_path, "orders", 4), hidden_directory(tmp_path, "other", 1)
    for directory in (*earlier, later, foreign):
        directory.mkdir(parents=True)
    assert sweep_hidden(tmp_path, "orders", 3) == 3
    assert later.exists()
    assert foreign.exists()


def test_a_place_is_named_to_spark_as_it_stands():
    """`Path.as_uri` writes a blank as %20, and Spark makes a folder of that name."""
    assert file_uri(Path("/data/all orders/ä%41#1")) == "file:///data/all orders/ä%41#1"


@pytest.mark.parametrize(
    "pair", [("a/b", "a_b"), (".hidden", "hidden"), ("_x", "x"), ("ä", "ö"), ("p" * 101, "p" * 102)]
)
def test_names_of_processors_that_differ_stay_apart_and_visible(pair):
    one, other = map(safe_name, pair)
    assert one != other
    assert not one.startswith((".", "_"))
    assert "/" not in one
