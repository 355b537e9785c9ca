"""The tables and charts of a benchmark, and the rows that it compares with."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from tests.tools.bench import rows
from tests.tools.bench.chart import draw
from tests.tools.bench.figures import Figure, Result, Turn
from tests.tools.bench.table import format_number, format_results, format_section, replace_section
from tests.tools.ledger.account import Order

RATE = Figure("messages/s")
RESULTS = [
    Result("Ordered <1>", True, "defaults", [Turn({RATE.name: 2000}, {"worker": 12.0}), Turn({RATE.name: 3000})], 61.5),
    Result("peer", False, "", [Turn({RATE.name: 1000}, {"peer": 3.0}), Turn({RATE.name: 5000}, {}, "2 lost")], 0),
    Result("broken", False, "", [Turn({}, {}, "0 of 7 were handled in 60 s")]),
]


def test_a_ratio_to_ours_stands_beside_each_peer() -> None:
    lines = format_results(RESULTS, [RATE], "CPU microseconds a message")
    assert lines[2:5] == [
        "| Ordered <1> (**A**) | 2,500 (2,000-3,000) | - | 12.0 | - | 61.5 | exact |",
        "| peer | 1,000 (1,000-1,000) | 2.00x | - | 3.00 | - | run 2: 2 lost |",
        "| broken | failed | - | - | - | - | run 1: 0 of 7 were handled in 60 s |",
    ]
    assert lines[-1] == "Columns worker, peer: CPU microseconds a message (medians)."


def test_a_peer_that_is_unsteady_is_compared_by_its_best_run_and_marked() -> None:
    rates = {"ours": [600] * 4, "steady": [60] * 4, "another": [300] * 4, "odd": [100, 300, 100, 300]}
    results = [
        Result(name, name == "ours", "", [Turn({RATE.name: rate}) for rate in each]) for name, each in rates.items()
    ]
    assert format_results(results, [RATE], "")[2:6] == [
        "| ours (**A**) | 600 (600-600) | - | - | exact |",
        "| steady | 60.0 (60.0-60.0) | 10.00x | - | exact |",
        "| another | 300 (300-300) | 2.00x | - | exact |",
        "| odd | 200 (100-300) | 2.00x (best) | - | exact |",
    ]


def test_where_nothing_is_handled_there_is_no_ledger() -> None:
    idle = Result("idle", True, "", [Turn({RATE.name: 1})], counted=False)
    assert format_results([idle], [RATE], "")[2] == "| idle (**A**) | 1.00 (1.00-1.00) | - | - | - |"


def test_numbers_have_three_digits() -> None:
    assert [format_number(each) for each in (123456.7, 99.44, 1.234)] == ["123,457", "99.4", "1.23"]


def test_a_forced_run_says_so_above_its_table() -> None:
    lines = format_section("Title", "About.", ["| table |"], ["a note"], {"machine": "m", "none": ""}, ["it was busy"])
    assert lines[4] == "**These figures mean little: the run was forced (FORCE=1).**"
    assert lines[6] == "- it was busy"
    assert lines[-2:] == ["- a note", "- machine: m"]
    assert not any("forced" in line for line in format_section("T", "A", [], [], {}, []))


def test_a_section_replaces_its_former_self_and_nothing_else() -> None:
    page = "# Page\n\n<!-- case a -->\nold\n<!-- end a -->\n\nafter\n"
    replaced = replace_section(page, "a", ["new"])
    assert replaced == "# Page\n\n<!-- case a -->\nnew\n<!-- end a -->\n\nafter\n"
    assert replace_section(replaced, "b", ["x"]).endswith("after\n\n<!-- case b -->\nx\n<!-- end b -->\n")


def test_a_chart_has_a_bar_for_each_that_has_a_number() -> None:
    drawn = ET.fromstring(draw("A & B", RATE, RESULTS))
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == ["A & B", "messages/s, more is better; median, least and most"]
    assert texts[2:] == ["Ordered <1>", "2,500", "peer", "1,000"]
    bars = [float(bar.attrib["width"]) for bar in drawn.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert bars[0] / bars[1] == pytest.approx(2.5, rel=0.01)


def test_a_chart_of_failed_runs_is_empty() -> None:
    assert "<line" not in draw("title", RATE, RESULTS[2:])


def test_the_ledger_finds_what_is_wrong_with_the_rows() -> None:
    found = [rows.handled(n) for n in range(1, 2001)]
    assert rows.judge(1, 2000, found, Order.TOTAL) == ""
    assert rows.judge(1, 2000, found[1:], Order.TOTAL).startswith("1 lost of 2,000 (first: order-0001#1 (m-1)")
    assert rows.judge(1, 2000, [*found, found[0]], Order.NONE).startswith("1 duplicated")
    assert "1 out of order" in rows.judge(1, 2000, [found[1], found[0], *found[2:]], Order.TOTAL)
    assert rows.judge(1, 2000, [found[1], found[0], *found[2:]], Order.KEY) == ""
    assert "never committed" in rows.judge(1, 1999, found, Order.TOTAL)
