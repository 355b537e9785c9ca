"""What an example writes to is made by examples/orders.sql, or by a statement in the example's own comment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SHOP = (EXAMPLES / "orders.sql").read_text()
WRITTEN = re.compile(r"\b(?:INSERT INTO|COPY) ([a-z_0-9.]+)")


def made(text: str) -> set[str]:
    return set(re.findall(r"CREATE TABLE ([a-z_0-9.]+)", text))


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.relative_to(EXAMPLES))
def test_table_is_made(path: Path) -> None:
    text = path.read_text()
    assert set(WRITTEN.findall(text)) - made(SHOP) - made(text) == set()


def test_tables_are_found() -> None:
    found = {table for path in EXAMPLES.rglob("*.yaml") for table in WRITTEN.findall(path.read_text())}
    assert {"projection.order_totals", "report_orders", "shop.mails", "loyalty.points"} <= found
