"""The texts of the stored functions, as `sql/functions` has them."""

from __future__ import annotations

import re
from pathlib import Path

from outbox_sql import runner

FOLDER = Path(runner.__file__).parent / "functions"
_FUNCTION = re.compile(r'^CREATE OR REPLACE FUNCTION :"schema"\.(\w+)\(.*?\$function\$;$', re.DOTALL | re.MULTILINE)


def read_functions() -> list[tuple[str, str]]:
    """Name and text of each; two functions with different arguments may have one name."""
    return [
        (match[1], match[0]) for file in sorted(FOLDER.glob("*.sql")) for match in _FUNCTION.finditer(file.read_text())
    ]


def read_function(name: str) -> str:
    """The text, of all functions of that name."""
    return "\n".join(text for found, text in read_functions() if found == name)
