"""`operator/` must never become Python's own module, and the wheel must hold what the tree holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = {"operator/src": "", "worker/src": "", "sql": "outbox_sql"}


def test_no_python_file_stands_directly_in_operator() -> None:
    assert sorted(p.name for p in (ROOT / "operator").glob("*.py")) == []


@pytest.mark.parametrize("flags", [[], ["-S"], ["-I"]], ids=["plain", "without site", "isolated"])
def test_standard_operator_module_wins_when_started_at_the_root(flags: list[str]) -> None:
    code = "import operator, collections; print(operator.itemgetter(0)('x'))"
    done = subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "x"), done.stderr


def test_every_package_folder_is_listed_for_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for top, package in SHIPPED.items():
        for marker in (ROOT / top).rglob("__init__.py"):
            parts = marker.parent.relative_to(ROOT / top).parts
            found.add(".".join(([package] if package else []) + list(parts)))
    assert found == listed


def test_wheel_holds_every_module_and_every_sql_file(tmp_path: Path) -> None:
    # In a copy: setuptools would pack what an earlier build left in build/.
    tree = tmp_path / "tree"
    for top in ("operator", "worker", "sql"):
        shutil.copytree(ROOT / top, tree / top, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".py", ".sql"))}
    wanted = set()
    for top, package in SHIPPED.items():
        for source in [*(ROOT / top).rglob("*.py"), *(ROOT / top).rglob("*.sql")]:
            wanted.add(str(Path(package) / source.relative_to(ROOT / top)))
    assert shipped == wanted


@pytest.mark.parametrize("top", [*SHIPPED, "tests"])
def test_no_folder_has_more_than_fifteen_modules(top: str) -> None:
    modules = Counter(path.parent for path in (ROOT / top).rglob("*.py") if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): count for folder, count in modules.items() if count > 15} == {}


@pytest.mark.parametrize("top", [*SHIPPED, "tests"])
def test_no_module_has_more_than_five_hundred_lines(top: str) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / top).rglob("*.py")}
    assert {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > 500} == {}


def test_the_mark_calm_is_named_where_the_marked_tests_are() -> None:
    """The pass of those tests reads only files that have the word (`tests/conftest.py`); the other leaves them out."""
    named = [path.name for path in (ROOT / "tests").rglob("*.py") if "mark" + ".calm" in path.read_text()]
    assert named
    assert [name for name in named if not name.startswith("test_")] == []
