"""What is asked of the models: what runs must hold, every bad variant must fail, and where it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.model.checker import HOLDS, TEMPORAL, Question

_ONE_FAULT: Final = {"Faults": "1"}
_HANDS: Final = {"Edits": "1"}
_SMALL: Final = {"Last": "1"}


@dataclass(frozen=True, slots=True)
class Case:
    """A question in words, and its answer: HOLDS, or what TLC must find violated."""

    name: str
    question: Question
    verdict: str = HOLDS


def _invariant(name: str, sentence: str, **constants: str) -> Case:
    """Fails after a single fault."""
    return Case(sentence, Question(constants={**_ONE_FAULT, **constants}, invariants=(name,)), name)


def _step(name: str, sentence: str, **constants: str) -> Case:
    """Fails after a single fault, in one step from a state to the next."""
    return Case(sentence, Question(constants={**_ONE_FAULT, **constants}, properties=(name,)), name)


def _still_once(sentence: str, **constants: str) -> Case:
    return Case(sentence, Question(constants=constants, invariants=("ExactlyOnce",), symmetric=True))


def _rebalance(sentence: str, verdict: str = HOLDS, **constants: str) -> Case:
    """Ask about a change of the number of partitions; without a verdict, all that its .cfg names."""
    invariants = () if verdict == HOLDS else (verdict,)
    question = Question("Rebalance", constants, invariants=invariants, symmetric=verdict == HOLDS)
    return Case(f"partitions: {sentence}", question, verdict)


def _ranges(sentence: str, verdict: str = HOLDS, **constants: str) -> Case:
    """Ask the same where checkpoints are snapshot ranges."""
    invariants = () if verdict == HOLDS else (verdict,)
    question = Question("SnapshotRanges", constants, invariants=invariants, symmetric=verdict == HOLDS)
    return Case(f"partitions, cursor Snapshot: {sentence}", question, verdict)


def _crash(sentence: str, verdict: str = HOLDS, **constants: str) -> Case:
    """Ask what a crash of the server does to snapshot ranges that a process remembers over it."""
    invariants = () if verdict == HOLDS else (verdict,)
    constants = {"Asks": "0", "Crashes": "1", "Begun": "{1}", "Acquires": "1"} | constants
    question = Question("SnapshotRanges", constants, invariants=invariants, symmetric=verdict == HOLDS)
    return Case(f"a crash, cursor Snapshot: {sentence}", question, verdict)


def _pipeline(sentence: str, verdict: str = HOLDS, **constants: str) -> Case:
    """Ask about several batches under way."""
    invariants = () if verdict == HOLDS else (verdict,)
    question = Question("Pipeline", constants, invariants=invariants, symmetric=verdict == HOLDS)
    return Case(f"batches under way: {sentence}", question, verdict)


def _numbers(sentence: str, verdict: str = HOLDS, **constants: str) -> Case:
    """Ask about numbers by which a receiver drops what it has."""
    invariants = () if verdict == HOLDS else (verdict,)
    question = Question("Numbers", constants, invariants=invariants, symmetric=verdict == HOLDS)
    return Case(f"numbers: {sentence}", question, verdict)


_APART: Final = {"Kept": '"apart"'}


GOOD: Final = (
    Case("what runs, two faults", Question(symmetric=True)),
    Case(
        "what runs, one fault and a hand that edits the row",
        Question(constants={**_ONE_FAULT, **_HANDS}, symmetric=True),
    ),
    Case("what runs: a standby goes on", Question(constants=_SMALL, properties=("StandbyGoesOn",))),
    Case("what runs: it goes on in time", Question("Takeover")),
    _rebalance("what runs"),
    _ranges("what runs"),
    _crash("what runs"),
    _crash("what runs, where the checkpoint is in another server", **_APART),
    _pipeline("what runs"),
    _numbers("what runs"),
)

BAD: Final = (
    _invariant("NoneSuperseded", "the epoch is not checked: the fence is removed", EpochChecked="FALSE"),
    _invariant(
        "ExactlyOnce", "neither epoch nor expected pair are checked", EpochChecked="FALSE", PairCompared="FALSE"
    ),
    _invariant("NoneSuperseded", "the epoch is checked without a lock", FenceLocked="FALSE"),
    _step("OnlyLiveOwnersPass", "a lapsed lease passes as long as nobody took over", LapseChecked="FALSE"),
    Case(
        "the lock without the idle timeout: an owner frozen or cut off blocks the takeover",
        Question(constants={**_ONE_FAULT, **_SMALL, "IdleEnded": "FALSE"}, properties=("StandbyGoesOn",)),
        TEMPORAL,
    ),
    Case(
        "an idle timeout above the lease",
        Question("Takeover", {"Idle": "30"}, invariants=("TakenOverInTime",)),
        "TakenOverInTime",
    ),
    _step("EffectsWithCheckpoint", "the expected pair is not compared", PairCompared="FALSE", **_HANDS),
    _invariant("ExactlyOnce", "the row is compared without a lock", RowLocked="FALSE"),
    _step("NothingEditedIsLoaded", "the row is not compared with its copy", CopyCompared="FALSE", **_HANDS),
    _invariant(
        "NobodyWorksDuringConflict",
        "a conflict recorded late asks again what a person decided",
        LateIgnored="FALSE",
        **_HANDS,
    ),
    _invariant("ExactlyOnce", "a refused batch is committed all the same", RefusalRollsBack="FALSE"),
    _invariant("NoFalseConflict", "a COMMIT without an answer is taken for failed", Doubt='"failed"'),
    _invariant("NoFalseConflict", "a COMMIT without an answer is taken for done", Doubt='"done"'),
    _rebalance("the barrier at the high-water mark", "NobodyBeyond", Barrier='"high-water mark"'),
    _rebalance("a reader looks for the barrier before it reads", "NobodyBeyond", LooksAfter="FALSE"),
    _rebalance("an owner never compares their number", "NothingSkipped", NumberChecked="FALSE", NumberLooked="FALSE"),
    _rebalance("the change does not wait for all", "NothingSkipped", AllAwaited="FALSE"),
    _rebalance("leases outlast it unseen", "NothingSkipped", LeasesEnded="FALSE", NumberLooked="FALSE"),
    _ranges("the barrier is the asking transaction's own snapshot", "NobodyBeyond", Barrier='"own"'),
    _ranges("a reader looks for the wish before it takes its snapshot", "NobodyBeyond", LooksAfter="FALSE"),
    _ranges("a snapshot range that sees the mark is kept", "NobodyBeyond", Drops="FALSE"),
    _crash("the server's run is not compared", "NothingSkipped", Runs="FALSE"),
    _crash("a snapshot range is kept apart whose WAL is not flushed", "NothingSkipped", Flushed="FALSE", **_APART),
    _pipeline("a later batch is stored before an earlier one", "NothingLost", OldestFirst="FALSE"),
    _pipeline("a batch is stored before it is confirmed", "NothingLost", Awaited="FALSE"),
    _pipeline("what was under way is believed taken after a fault", "NothingLost", ReadAgain="FALSE"),
    _numbers("a message is sent with a number behind one that is left out", "NothingLost", Bare="FALSE"),
    _numbers("a batch is begun with numbers before all of the one ahead is there", "NothingLost", Whole="FALSE"),
)

AGAIN: Final = (
    _invariant("NoFalseConflict", "the epoch is checked without a lock: a false alarm", FenceLocked="FALSE"),
    _step("NeverBack", "the expected pair is not compared: the checkpoint goes back", PairCompared="FALSE", **_HANDS),
    _rebalance("leases outlast it unseen: a false alarm", "NoFalseConflict", LeasesEnded="FALSE", NumberLooked="FALSE"),
    _ranges("the change does not wait for all", "NothingSkipped", AllAwaited="FALSE"),
    _crash("the server's run is not compared: a false alarm", "NoFalseConflict", Runs="FALSE"),
)
"""What else is violated by variants of BAD."""

POSSIBLE: Final = (
    _rebalance("the model comes to a change", "NeverChanged"),
    _rebalance("the model comes to a process of another number at work", "NeverStale"),
    _ranges("the model comes to a change", "NeverChanged"),
    _crash("the model comes to a process that remembers an id that was handed out again", "NeverAgain"),
    _ranges("the model comes to a barrier that an idle partition has to store", "NeverAtBarrierInMemory"),
    _pipeline("not promised: a message comes once after a fault", "NeverAgain"),
    _pipeline("the model comes to a later batch that is confirmed first", "NeverOvertaken"),
    _numbers("not promised: a message is there once although one before it was left out", "AlwaysOnce"),
    _numbers("the model comes to a batch that is confirmed before the one ahead is stored", "NeverAhead"),
    _invariant("NoCommitAfterLapse", "not promised: no commit after the lease lapsed, while nobody took over"),
    Case(
        "not promised: in time although the fence is held by a long statement",
        Question("Takeover", {"Statement": "10"}, invariants=("TakenOverInTime",)),
        "TakenOverInTime",
    ),
    _invariant("NeverReplacedBeforeStore", "the model comes to: frozen before the store, and replaced"),
    _invariant("NeverReplacedBeforeCommit", "the model comes to: frozen between store and commit, and replaced"),
    _invariant("NeverReplacedInsideStatement", "the model comes to: frozen inside a statement, and replaced"),
    _invariant("NeverReplacedBetweenBatches", "the model comes to: frozen between batches, and replaced"),
)

LARGE: Final = (
    _numbers("what runs, four messages, two faults, two left out", Last="4", Faults="2", Epochs="3", Unfits="2"),
    _pipeline("what runs, three batches of four messages, two faults", Last="4", Most="3", Faults="2", Epochs="3"),
    _ranges("what runs, three transactions", Last="3"),
    _crash("what runs, a lease acquired again", Acquires="2"),
    _crash("what runs, two crashes, three transactions", Crashes="2", Last="3"),
    _crash("what runs, two partitions", Begun="{1, 2}"),
    _crash("what runs apart, two crashes, three transactions", Crashes="2", Last="3", **_APART),
    _ranges("what runs, two changes or one taken back", Asks="2", Acquires="3"),
    _ranges("leases outlast it, but each reading looks at their number", LeasesEnded="FALSE"),
    _ranges("the model comes to a wish inside an open snapshot range", "NeverInsideAtWish", Last="3"),
    _rebalance("what runs, two changes or one taken back", Asks="2", Acquires="3"),
    _rebalance("what runs, four transactions", Last="4"),
    _rebalance("leases outlast it, but each reading looks at their number", LeasesEnded="FALSE"),
    _rebalance("nobody looks at their number again, but leases end", NumberLooked="FALSE"),
    _rebalance("their number is not compared under the lease, but after each reading", NumberChecked="FALSE"),
    Case("what runs, three faults", Question(constants={"Faults": "3"}, symmetric=True)),
    Case("what runs, two faults and a hand", Question(constants=_HANDS, symmetric=True)),
    Case("what runs, one fault and two hands", Question(constants={**_ONE_FAULT, "Edits": "2"}, symmetric=True)),
    Case("what runs, three messages", Question(constants={"Last": "3"}, symmetric=True)),
    Case("what runs, three processes", Question(constants={"Workers": "{w1, w2, w3}"}, symmetric=True)),
    Case("what runs: a standby goes on, two messages", Question(properties=("StandbyGoesOn",))),
    _still_once("the fence is removed: effects are still once", EpochChecked="FALSE"),
    _still_once("the epoch is checked without a lock: effects are still once", FenceLocked="FALSE"),
    _still_once("a COMMIT without an answer is taken for failed: effects are still once", Doubt='"failed"'),
)
