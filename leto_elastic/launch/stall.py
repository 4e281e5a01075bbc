"""The record of one recovery: from the death of the first worker to the first step committed by every rank.

Workers send, with their first commit of an epoch, named instants (monotonic seconds) at which a phase of *their*
recovery ended: `abort` (the aborted step is left, the survivor waits for its plan), `attach` (segments mapped),
`rebuild` (communicators connected), `resolve`, `first_step`. The agent knows when it noticed the death and when it sent
the plan. A phase lasts from the latest mark before it to its own; of all ranks the longest counts, because everybody
waits for that one. Phases of different ranks overlap, so the sum may exceed the stall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from leto_elastic.launch.actions import Death
from leto_elastic.observe.events import RECOVERY_PHASES
from leto_elastic.wire import Committed

_WORKER_ORDER = ("abort", "attach", "rebuild", "resolve", "first_step")


@dataclass
class Stall:
    """A recovery under way. All times monotonic seconds.

    Args:
        died: when the first worker ended, as near as is known.
        noticed: when the agent saw it.
        newest: newest step that any header of this node stood at then.
        version: the step that all state was brought to, when memory was lost.
    """

    died: float
    noticed: float
    newest: int
    deaths: list[Death] = field(default_factory=list)
    actions: dict[int, str] = field(default_factory=dict)
    launched: float = 0.0
    version: int | None = None

    def add(self, death: Death) -> None:
        """A further worker ended; of no effect when that of its rank is known."""
        if all(known.rank != death.rank for known in self.deaths):
            self.deaths.append(death)

    def fields(
        self, epoch: int, commits: Mapping[int, Committed], now: float, pids: Mapping[int, int]
    ) -> dict[str, object]:
        """The fields of the `recovery` event.

        Args:
            epoch: the epoch that the commits belong to.
            commits: by rank, all of them.
            now: when the last commit arrived.
            pids: processes of the replaced ranks.
        """
        ends = [commit.marks.get("first_step", now) for commit in commits.values()]
        ranks = sorted({death.rank for death in self.deaths})
        first = self.deaths[0]
        forward = any(commits[rank].resolution == "forward" for rank in ranks if rank in commits)
        reached = min(commit.step for commit in commits.values()) if self.version is None else self.version
        return {
            "epoch": epoch,
            "cause": str(first.cause),
            "rank": first.rank,
            "ranks": ranks,
            "action": self.actions.get(first.rank, "promote"),
            "actions": {str(rank): action for rank, action in sorted(self.actions.items())},
            "resolution": "forward" if forward else "rerun",
            "lost_steps": max(0, self.newest - reached),
            "stall_ms": _ms(max(ends) - self.died),
            "phases_ms": self._phases(commits),
            "pids": {str(rank): pid for rank, pid in sorted(pids.items())},
        }

    def _phases(self, commits: Mapping[int, Committed]) -> dict[str, float]:
        longest = dict.fromkeys(RECOVERY_PHASES, 0.0)
        longest["detect"] = self.noticed - self.died
        longest["plan"] = self.launched - self.noticed
        for rank, commit in commits.items():
            before = self.noticed
            for name in _WORKER_ORDER:
                mark = commit.marks.get(name)
                if mark is None or (name == "abort" and rank in self.actions):  # a replacement has nothing to leave
                    continue
                start = before if name == "abort" else max(before, self.launched)
                longest[name] = max(longest[name], mark - start)
                before = max(before, mark)
        return {name: _ms(seconds) for name, seconds in longest.items()}


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
