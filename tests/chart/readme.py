"""The table of values in the chart's README, made from `values.yaml` and the comments there that start with `# --`.

python -m tests.chart.readme        writes it; a test says when it is old
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tests.chart.chart import CHART

BEGIN = "<!-- values -->"
END = "<!-- /values -->"
KEY = re.compile(r"^( *)([A-Za-z]\w*):")


def documented(text: str) -> dict[str, str]:
    """The path of every value that has a comment, with the comment."""
    found: dict[str, str] = {}
    parents: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = [stripped.removeprefix("# -- ")]
        elif stripped.startswith("# ") and comment:
            comment.append(stripped.removeprefix("# "))
        elif key := KEY.match(line):
            depth = len(key[1]) // 2
            parents = [*parents[:depth], key[2]]
            if comment:
                found[".".join(parents)] = " ".join(comment)
            comment = []
    return found


def leaves(values: dict[str, Any], path: str = "") -> list[str]:
    """The path of every value that is no object, or an empty one."""
    found = []
    for key, value in values.items():
        inner = f"{path}.{key}" if path else key
        found += leaves(value, inner) if isinstance(value, dict) and value else [inner]
    return found


def default_of(values: dict[str, Any], path: str) -> Any:
    """The value at a dotted path."""
    value: Any = values
    for key in path.split("."):
        value = value[key]
    return value


def table() -> str:
    """The values as a Markdown table, in the file's order."""
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for path, comment in documented(text).items():
        rows.append(f"| `{path}` | `{json.dumps(default_of(values, path))}` | {comment} |")
    return "\n".join(rows)


def with_table(readme: str) -> str:
    """The README with the table as it is now."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    path = CHART / "README.md"
    path.write_text(with_table(path.read_text()))
