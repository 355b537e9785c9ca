"""PURE: a case as Markdown."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from tests.tools.bench.figures import Figure, Result, calculate_ratio, find_unsteady

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NOTHING = "-"


def format_number(value: float) -> str:
    """Three digits that mean something; thousands are separated."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_range(numbers: list[float]) -> str:
    """Median, and in brackets the least and the most."""
    if not numbers:
        return "failed"
    return f"{format_number(median(numbers))} ({format_number(min(numbers))}-{format_number(max(numbers))})"


def format_results(results: Sequence[Result], figures: Sequence[Figure], cpu: str) -> list[str]:
    """Return the table: one line for each candidate, a ratio to each of ours for each figure."""
    ours = [each for each in results if each.ours]
    letters = {each.name: chr(ord("A") + number) for number, each in enumerate(ours)}
    unsteady = {figure: find_unsteady(results, figure) for figure in figures}
    named = dict.fromkeys(name for each in results for name in each.cpu())
    processes = sorted(named, key=lambda name: name[0].isupper())  # the servers last
    header = ["what runs"]
    for figure in figures:
        header += [figure.name, *(f"{letter} is better by" for letter in letters.values())]
    header += [*processes, "peak MB", "ledger"]
    lines = [_line(header), _line(["---"] + ["--:"] * (len(header) - 2) + ["---"])]
    for each in results:
        mark = f" (**{letters[each.name]}**)" if each.name in letters else ""
        cells = [each.name + mark]
        for figure in figures:
            cells.append(format_range(each.numbers(figure.name)))
            to_best = not each.ours and each.name in unsteady[figure]
            cells += [_ratio(our, each, figure, to_best=to_best) for our in ours]
        used = each.cpu()
        cells += [format_number(used[name]) if name in used else _NOTHING for name in processes]
        cells += [format_number(each.peak_mb) if each.peak_mb else _NOTHING, _ledger(each)]
        lines.append(_line(cells))
    lines += ["", f"Columns {', '.join(processes)}: {cpu} (medians)."] if processes else []
    return lines


def format_section(
    title: str,
    about: str,
    table: Sequence[str],
    notes: Sequence[str],
    settings: Mapping[str, str],
    warnings: Sequence[str],
) -> list[str]:
    """Return a case's part of the page, from its title on."""
    lines = [f"## {title}", "", about, ""]
    if warnings:
        lines += ["**These figures mean little: the run was forced (FORCE=1).**", ""]
        lines += [*(f"- {warning}" for warning in warnings), ""]
    lines += [*table, ""]
    lines += [f"- {note}" for note in notes]
    lines += [f"- {name}: {value}" for name, value in settings.items() if value]
    return lines


def replace_section(page: str, name: str, lines: Sequence[str]) -> str:
    """Put a case's part into the page, between its two markers; at the end where there are none."""
    begin, end = f"<!-- case {name} -->", f"<!-- end {name} -->"
    part = "\n".join([begin, *lines, end])
    if begin not in page:
        return f"{page.rstrip()}\n\n{part}\n"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + part + after


def _ratio(our: Result, other: Result, figure: Figure, *, to_best: bool) -> str:
    if our is other:
        return _NOTHING
    ratio = calculate_ratio(our, other, figure, to_best=to_best)
    return _NOTHING if ratio is None else f"{ratio:.2f}x{' (best)' if to_best else ''}"


def _ledger(result: Result) -> str:
    failures = result.failures()
    exact = "exact" if result.counted else _NOTHING
    return "; ".join(failures) or exact


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
