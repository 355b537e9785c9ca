"""A worker's image has neither `kubernetes` nor PyYAML: what needs them says so, all else works without."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = (
    "import sys; sys.modules['kubernetes'] = sys.modules['yaml'] = None; "
    "from outbox_cli.main import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        pytest.param(("--help",), 0, "", id="help"),
        pytest.param(("status", "-n", "shop"), 1, "needs the package kubernetes: pip install", id="a cluster"),
        pytest.param(("lag", "--dsn-file", "y"), 1, "there is no file y", id="a database"),
        pytest.param(("run", "-f", "x.yaml"), 1, "manifests need the package PyYAML: pip install", id="a manifest"),
    ],
)
def test_without_the_extra(arguments, status, said):
    done = subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False)
    assert said in done.stderr
