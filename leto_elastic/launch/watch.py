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
from leto_elastic.state.header import Signs

FIRST_STEPS = 3
"""Steps committed before steps are judged by those before them."""

_WINDOW = 20
"""Steps that are remembered."""

_ASLEEP = 1.0
"""Seconds between two samples after which this agent has been asleep."""


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

    def look(self, now: float, samples: Mapping[int, Signs]) -> Finding:
        """The node's trainers by rank, at `now` (monotonic seconds)."""
        if now - self._last > _ASLEEP:
            self.rest()
            self._since = now
        self._last = now
        paused = max(sign.paused for sign in samples.values())
        if paused:
            self._came = None  # a step with a pause says nothing about others
        self._learn(now, max(sign.step for sign in samples.values()))
        signature = [(sign.progress, sign.paused) for sign in samples.values()]
        if signature != self._signature:
            self._signature, self._moved = signature, now
        stalled, limit = now - self._moved, self.limit
        if stalled <= limit or paused > now:
            stalled = 0.0
        oldest = now - self.patience
        if min(sign.beat for sign in samples.values()) >= oldest or self._since >= oldest:
            return Finding({}, stalled, limit)
        silences = {rank: now - max(sign.beat, sign.paused) for rank, sign in samples.items()}
        return Finding({rank: s for rank, s in silences.items() if s > self.patience}, stalled, limit)

    def _learn(self, now: float, newest: int) -> None:
        if newest > self._step >= 0:
            steps = newest - self._step
            self._steps += steps
            if self._came is not None:
                self._durations.append((now - self._came) / steps)
        if newest != self._step:
            self._came = now if self._step >= 0 else None  # the step that a watch begins with is not measured
            self._step = newest
