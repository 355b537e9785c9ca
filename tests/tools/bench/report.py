"""Writes what was measured: the page with all tables, and one chart for each figure of a case."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tests.tools.bench.chart import draw
from tests.tools.bench.table import format_results, format_section, replace_section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tools.bench.case import Case, Measured

PAGE = "README.md"


def build_section(case: Case, measured: Measured, versions: dict[str, str], warnings: Sequence[str]) -> list[str]:
    """Return the case's part of the page."""
    table = format_results(measured.results, case.figures, case.cpu)
    settings = {
        "measured": f"{datetime.now(UTC):%Y-%m-%d}, of commit {_read_commit()}",
        "versions": ", ".join(f"{name} {number}" for name, number in (_our_versions() | versions).items()),
        "settings": "; ".join(f"{each.name}: {each.settings}" for each in measured.results if each.settings),
        "machine": describe_machine(),
    }
    return format_section(case.title, case.about, table, measured.notes, settings, warnings)


def write(folder: Path, case: Case, measured: Measured, section: Sequence[str]) -> list[Path]:
    """Put the case into the page, and write its charts."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    written = [page]
    pictures = []
    for number, figure in enumerate(case.figures):
        chart = folder / (f"{case.name}.svg" if len(case.figures) == 1 else f"{case.name}-{number + 1}.svg")
        chart.write_text(draw(case.title, figure, measured.results))
        pictures += ["", f"![{case.title}: {figure.name}]({chart.name})"]
        written.append(chart)
    text = page.read_text() if page.exists() else "# Performance\n"
    page.write_text(replace_section(text, case.name, [*section, *pictures]))
    return written


def _our_versions() -> dict[str, str]:
    return {"Python": platform.python_version(), "psycopg": version("psycopg"), "pamqp": version("pamqp")}


def _read_commit() -> str:
    """Return the checkout's commit, and whether files differ from it; this page and its charts do after each case."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ":/", ":(top,exclude)docs/performance")
    return f"{commit or 'unknown'}{'-dirty' if changed else ''}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def describe_machine() -> str:
    """Say what a reader must know of the machine."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 1024 / 1024
    return f"{os.cpu_count()} processors ({model}), {memory:.0f} GiB, Linux {platform.release().split('-')[0]}"
