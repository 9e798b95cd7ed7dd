"""What the demo's workers would tell, without them: moments as the acts claim them, errands, a screen."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from replicast.audit import AuditReport, Deviation, Difference
from replicast.demo import act_one, act_three, act_two
from replicast.demo.act_one import ASSIGNED, CONTINUED, TRAINED
from replicast.demo.act_three import HALFWAY, RECOVERED, RESTORED, UNDISTURBED
from replicast.demo.act_two import PUSHED, SYNCED
from replicast.demo.acts import CHANGED, DELTA, WORKERS, programme
from replicast.demo.audience import Audience
from replicast.demo.errands import Errand, RunningErrand
from replicast.demo.notes import Moment, NoteWriter, notes_path
from replicast.demo.screen import progress_bar

ACT_ONE_AS_CLAIMED = {TRAINED: "aa", ASSIGNED: "ba", CONTINUED: "dc"}
ACT_THREE_AS_CLAIMED = {UNDISTURBED: "cc", HALFWAY: "bb", RESTORED: "aa", RECOVERED: "cc"}
AS_CLAIMED = {
    **ACT_ONE_AS_CLAIMED,
    SYNCED: "00",
    PUSHED: "ff",
    act_two.CONTINUED: "ee",
    **ACT_THREE_AS_CLAIMED,
}
"""At each moment the digests of worker 0 and worker 1, a character each, which stands for the sum too."""
FIRST_PROCESS = 2**22 + 1  # Above what the kernel gives out: no process has it.


def audited(step: int, differences: Sequence[Difference] = ()) -> AuditReport:
    return AuditReport(
        number=1,
        step=step,
        time=1.5,
        workers=WORKERS,
        variables=14,
        nbytes=28_932,
        found_at=step,
        last_equal=None,
        differences=tuple(differences),
        declared=(),
        outcome="warned" if differences else "equal",
        healed=(),
        digest_secs=0.001,
        requests=(),
    )


def difference(variable: str = f"classifier/{CHANGED}", by: float = DELTA, count: int = 2048) -> Difference:
    far = Deviation(count, 2048, by, 1.96, (0, 0))
    return Difference(variable, ((0,), (1,)), 0, "coordinator", {1: far})


AUDITS = {
    CONTINUED: audited(act_one.OneWorkerAssigns.steps, [difference()]),
    act_two.CONTINUED: audited(800),
}
"""What the audits of the acts find, by moment."""


def moment(name: str, worker: int, digest: str) -> Moment:
    later_life = name in (RESTORED, RECOVERED)
    return Moment(
        name=name,
        worker=worker,
        weights_sum=float(ord(digest)),
        digest=digest * 32,
        step=act_three.EXPECTED_STEPS.get(name, 0),
        process=FIRST_PROCESS + worker + (WORKERS if later_life else 0),
        audit=AUDITS.get(name),
    )


def replicas(digests: dict[str, str]) -> dict[str, list[Moment]]:
    return {
        name: [moment(name, worker, digest) for worker, digest in enumerate(both)]
        for name, both in digests.items()
    }


class Screen:
    """A console without a terminal."""

    def __init__(self, width: int = 80) -> None:
        self._file = io.StringIO()
        self.console = Console(file=self._file, width=width, highlight=False)

    @property
    def text(self) -> str:
        return self._file.getvalue()


class Errands:
    """Plays the process outside, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.started: list[Errand] = []
        self.code: int | None = 0
        self.stopped = 0

    def start(self, errand: Errand, width: int) -> RunningErrand:
        self.started.append(errand)
        return self

    def exit_code(self, wait_secs: float = 0.0) -> int | None:
        return self.code

    def output(self) -> str:
        return "the receipt [of the errand]\n"

    def stop(self) -> None:
        self.stopped += 1


def play(notes_dir: Path, digests: dict[str, str], screen: Screen) -> Audience:
    """Has an audience read the notes of workers that reached these moments."""
    with progress_bar(1, "starting", screen.console) as bar:
        audience = Audience(programme(), notes_dir, bar, screen.console)
        with audience:
            for worker in range(WORKERS):
                writer = NoteWriter(notes_path(notes_dir, worker))
                for name, both in digests.items():
                    writer.write(moment(name, worker, both[worker]))
    return audience
