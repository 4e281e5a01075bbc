"""When do the trainers of a node count as hung? Pure: samples and times in, a finding out.

Two kinds of silence are told apart:

* *silent*: a trainer in which no Python ran for `hang.heartbeat` seconds. It is stopped, or a thread of it holds the
  interpreter's lock and does not return. That is known of the trainer itself, so nobody else is asked.
* *stalled*: no trainer of the node got on for the learned limit: `hang.factor` times the longest of the last steps,
  and at least `hang.min` seconds. Who is to blame is another question (see `culprit`), since all stand still.

Until the job's first steps are committed, which may compile for long, `hang.first` seconds are the limit of both. While
a trainer has the watch paused it is not silent, and its node does not stall. During a recovery nobody is watched, and
all times begin anew after it; what was learned about steps is kept. They also begin anew when this agent itself did
not run for a while: a machine that was asleep says nothing about its processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from leto_elastic.recovery.policy import HangPolicy

FIRST_STEPS = 3
"""Steps committed before steps are judged by those before them."""

_WINDOW = 20
"""Steps that are remembered."""

_ASLEEP = 1.0
"""Seconds between two samples after which this agent has been asleep."""


class Sample(NamedTuple):
    """A trainer at an instant.

    Args:
        step: that its header stands at.
        progress: changes whenever it gets on.
        beat: when Python ran in it last, monotonic seconds.
        paused: until when it may stand still, monotonic seconds; 0.0: it may not.
    """

    step: int
    progress: tuple[int, int]
    beat: float
    paused: float


class Finding(NamedTuple):
    """What is wrong.

    Args:
        silent: seconds of silence, by rank.
        stalled: seconds in which no trainer of this node got on; 0.0 while that is no reason to worry.
        limit: in force for `stalled`.
    """

    silent: dict[int, float]
    stalled: float
    limit: float


class Watch:
    """Watches the trainers of one node through one start of the group."""

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._durations: deque[float] = deque(maxlen=_WINDOW)
        self._steps = 0
        self._step = -1  # the newest one (-1: none yet), and when a trainer came to it (None: not seen)
        self._came: float | None = None
        self._last = float("-inf")  # sample
        self._since = 0.0  # when times began anew
        self._moved = 0.0
        self._signature: object = None

    @property
    def limit(self) -> float:
        """Seconds without progress that are too many."""
        policy = self._policy
        if self._steps < FIRST_STEPS or not self._durations:
            return max(policy.first, policy.min)
        return max(policy.min, policy.factor * max(self._durations))

    @property
    def patience(self) -> float:
        """Seconds of silence that are too many."""
        first = self._policy.first if self._steps < FIRST_STEPS else 0.0
        return max(first, self._policy.heartbeat)

    def rest(self) -> None:
        """Nobody is watched now; times begin anew with the next sample."""
        self._signature = None
        self._step, self._came = -1, None
        self._last = float("-inf")

    def look(self, now: float, samples: Mapping[int, Sample]) -> Finding:
        """The node's trainers by rank, at `now` (monotonic seconds)."""
        if now - self._last > _ASLEEP:
            self.rest()
            self._since = now
        self._last = now
        if any(sample.paused for sample in samples.values()):
            self._came = None  # a step with a pause says nothing about others
        self._learn(now, max(sample.step for sample in samples.values()))
        signature = [(sample.progress, sample.paused) for sample in samples.values()]
        if signature != self._signature:
            self._signature, self._moved = signature, now
        silences = {
            rank: now - max(sample.beat, self._since, sample.paused)
            for rank, sample in samples.items()
            if sample.paused <= now
        }
        silent = {rank: seconds for rank, seconds in silences.items() if seconds > self.patience}
        stalled = now - self._moved
        if stalled <= self.limit or len(silences) < len(samples):
            stalled = 0.0
        return Finding(silent, stalled, self.limit)

    def _learn(self, now: float, newest: int) -> None:
        if newest > self._step >= 0:
            steps = newest - self._step
            self._steps += steps
            if self._came is not None:
                self._durations.append((now - self._came) / steps)
        if newest != self._step:
            self._came = now if self._step >= 0 else None  # the step that a watch begins with is not measured
            self._step = newest
