"""When each rank committed which step, in which process: the lines that a script under test writes, and what they tell.

A line is `STEP SECONDS PID`: a step, when it was committed (the machine's monotonic clock), and by which process.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Commit(NamedTuple):
    """One step that one process committed, at a monotonic time in seconds."""

    step: int
    time: float
    pid: int


Commits = Mapping[int, Sequence[Commit]]
"""By rank, in the order written. A step is there again when it was run again."""


class StepLog:
    """The files `times.rank<R>.txt` of a run directory, read as they grow."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._paths = [directory / f"times.rank{rank}.txt" for rank in range(ranks)]
        self._read = [0] * ranks
        self._commits: dict[int, list[Commit]] = {rank: [] for rank in range(ranks)}

    def commits(self) -> dict[int, list[Commit]]:
        """All so far. Raises ValueError when a line is not one of a step."""
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read[rank] += len(data)
            for line in data.decode().splitlines():
                step, time, pid = line.split()
                self._commits[rank].append(Commit(int(step), float(time), int(pid)))
        return self._commits


class Stall(NamedTuple):
    """What a fault cost: seconds beyond a normal step until the next one of all ranks, and steps done again."""

    seconds: float
    lost_steps: int


def normal_step(commits: Commits, instants: Sequence[float] = ()) -> float:
    """Median seconds from one commit to the next of the same process, those with a fault in between left out."""
    times = [
        after.time - before.time
        for records in commits.values()
        for before, after in pairwise(records)
        if after.step == before.step + 1
        and after.pid == before.pid
        and not any(before.time < instant < after.time for instant in instants)
    ]
    return statistics.median(times) if times else 0.0


def stall(commits: Commits, instant: float, normal: float) -> Stall | None:
    """Of a fault at `instant`: until the end of the first step that every rank began after it and committed.

    A step begins when the one before it, or its own earlier attempt, was committed. None: there was no such step.
    """
    begun = [
        {after.step: after.time for before, after in reversed(list(pairwise(records))) if before.time > instant}
        for records in commits.values()
    ]
    if not begun or not (common := set.intersection(*(set(steps) for steps in begun))):
        return None
    step = min(common, key=lambda number: max(steps[number] for steps in begun))
    end = max(steps[step] for steps in begun)
    before = [[record.step for record in records if record.time <= instant] for records in commits.values()]
    after = [[record.step for record in records if instant < record.time <= end] for records in commits.values()]
    done = min((max(steps) for steps in before if steps), default=-1)
    again = max(min(steps) for steps in after)  # one rank alone may note its last step twice, which loses nothing
    return Stall(max(0.0, end - instant - normal), max(0, done + 1 - again))
