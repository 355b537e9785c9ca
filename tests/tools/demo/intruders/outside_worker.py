"""A worker started by hand outside the cluster, under the same id, as a second cluster would.

The claim refuses it. Told to take over by force, it does, in the middle of the owner's batch: that batch is answered 4
and rolled back. The operator scales its worker to zero and names the foreign owner. When the outsider stops, the
cluster's worker becomes owner again by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Final

from tests.tools.demo.place import CHECKOUT, NAMESPACE, PROJECTION
from tests.tools.demo.scene import Scene
from tests.tools.demo.waiting import DemoError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.demo.scene import Demo

CLUSTER: Final = "another-cluster"
HOLDER: Final = f"{CLUSTER}/{NAMESPACE}/{PROJECTION}"
TABLE: Final = "projection.handled_orders"
CLAIM_HELD: Final = 10
STARTS_WITHIN: Final = 20.0
OWNER_AGAIN_WITHIN: Final = 120.0
"""The claim of who stopped without a word lapses after 30 s; the operator tries it with a backoff of 10 s and more."""


class Outsider:
    """A worker of another cluster: the same processor's configuration, another cluster's name."""

    def __init__(self, scene: Scene) -> None:
        """Write its configuration and connection files from those of the cluster's own worker."""
        self.name = f"outsider-{uuid.uuid4().hex[:6]}"
        self._directory = scene.demo.place.work / self.name
        connection = self._directory / "connections" / "source"
        scene.demo.application.write_secret_files(connection)
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{PROJECTION}-processor"
        found = scene.demo.cluster.get(path) or {"data": {}}
        (self._directory / "processor.json").write_text(found["data"].get("processor.json", ""))
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self, *arguments: str) -> list[str]:
        config, connections = self._directory / "processor.json", self._directory / "connections"
        files = ["--config", str(config), "--connections", str(connections)]
        return [sys.executable, "-m", "outbox_worker", "--cluster-id", CLUSTER, "--port", "0", *files, *arguments]

    def _environment(self) -> dict[str, str]:
        return {**{k: v for k, v in os.environ.items() if k != "KUBECONFIG"}, "POD_NAME": self.name}

    def ask(self) -> tuple[int, str]:
        """Ask for the claim once; return the exit code and the message of its report."""
        done = subprocess.run(
            self._command("--try-claim"),
            cwd=CHECKOUT,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        try:
            return done.returncode, str(json.loads(done.stdout)["message"])
        except (ValueError, KeyError):
            return done.returncode, (done.stdout + done.stderr).strip()

    def take_over(self) -> None:
        """Start for good, and by force."""
        log = (self._directory / "log").open("wb")
        self._process = subprocess.Popen(
            self._command("--take-over"), cwd=CHECKOUT, env=self._environment(), stdout=log, stderr=log
        )

    def stop(self) -> None:
        """SIGTERM, as anybody would, and wait for the end."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(40)

    def last_words(self) -> str:
        """Return the end of its log."""
        file: Path = self._directory / "log"
        return file.read_text(errors="replace")[-2000:] if file.exists() else ""

    def remove(self) -> None:
        """Take its files away; one is a password."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)


def run(demo: Demo) -> None:
    """Be refused, take over by force, stop, and see the cluster's worker back."""
    scene = Scene(demo, "outside worker", PROJECTION)
    outsider = Outsider(scene)
    try:
        refused(scene, outsider)
        taken_over(scene, outsider)
        outsider.stop()
        scene.did("SIGTERM to the outsider: it stops")
        comes_back(scene)
    except DemoError:
        scene.note(f"the outsider's log ends:\n{outsider.last_words()}")
        raise
    finally:
        outsider.remove()


def refused(scene: Scene, outsider: Outsider) -> None:
    """Ask as a second cluster would."""
    scene.did(f"python -m outbox_worker --cluster-id {CLUSTER} --try-claim, on this machine")
    status, words = outsider.ask()
    scene.told(f"exit status {status}: {words}")
    scene.require("refused by the claim, which names the owner", status == CLAIM_HELD and PROJECTION in words)


def taken_over(scene: Scene, outsider: Outsider) -> None:
    """Take over in the middle of the owner's batch; see it refused, scaled down, and the owner named."""
    database = scene.demo.database
    before = scene.count_answers(4)
    with database.hold_next_batch(TABLE):
        owner = database.lease(PROJECTION)
        scene.did(f"python -m outbox_worker --take-over, in the middle of a batch of {owner.pod if owner else '?'}")
        outsider.take_over()
        scene.expect("the claim is the outsider's", lambda: holds_claim(scene), within=STARTS_WITHIN)
    scene.mark()
    scene.expect("one more refusal with code 4 in status.conflicts", lambda: scene.count_answers(4) > before)
    scene.told_answer(scene.resource().conflicts["last"])
    scene.expect_event(HOLDER)
    scene.expect_condition("OwnershipGranted", "False", HOLDER)
    scene.expect_no_pods()
    held = database.checkpoint(PROJECTION) or (0, 0)
    scene.expect(
        "the outsider handles messages meanwhile",
        lambda: (database.checkpoint(PROJECTION) or (0, 0)) > held,
        within=STARTS_WITHIN,
    )
    lease = database.lease(PROJECTION)
    scene.require("the lease is the outsider's", lease and lease.pod == outsider.name)


def holds_claim(scene: Scene) -> bool:
    """Whether the claim is the outsider's."""
    claim = scene.demo.database.claim(PROJECTION)
    return claim is not None and claim[:3] == (CLUSTER, NAMESPACE, PROJECTION)


def comes_back(scene: Scene) -> None:
    """See the cluster's worker become owner again without anybody's help."""
    scene.expect_condition("OwnershipGranted", "True", within=OWNER_AGAIN_WITHIN)
    scene.expect_condition("Ready", "True", within=STARTS_WITHIN)
    lease = scene.demo.database.lease(PROJECTION)
    scene.require("a pod of the cluster has the lease", lease and lease.live and lease.pod.startswith(PROJECTION))
