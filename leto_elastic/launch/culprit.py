"""Which rank makes all others stand still? Pure: where every rank stands in, who must go out.

Ranks enter the same collectives in the same order, so whoever keeps the others waiting has entered fewer of the group
that they wait in. A rank that waits in a collective *blames* the members of its group that have not entered it, and
these may wait in turn for somebody else, in another group. Following the blame ends

* at a rank that waits for nobody: it sleeps, loops or computes without end. Or
* in a group in which all members wait, but not in the same collective: one left out a collective of this group, and met
  the others in the next. It is the one, or few, that differ from most; of two, the one that is further along. Or
* in a circle, when a rank left out a collective and now waits in a later one. It is the one that is further along than
  those who blame it, as far as the phases of the step tell; else the one that most blame; else the one with the fewest
  calls; else, as nothing tells them apart, the lowest.

When every rank has entered the collective that all wait in, a connection is dead, and no rank is to blame. To replace
one of them builds all connections anew, so the lowest rank has to bear it. When no rank waits, all of them compute
for too long at once, and to replace one would help nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """A rank that does not get on.

    Args:
        step, phase: of its header.
        waiting: key of the group of its first operation that is not over, 0: there is none.
        calls, last: collectives entered and signature of the last of them, by key of the group.
        parked: its epoch was lost to it, so it waits for a plan, whatever it waited in before.
        silent: no Python runs in it.
    """

    rank: int
    step: int
    phase: int
    waiting: int
    calls: dict[int, int]
    last: dict[int, int]
    parked: bool = False
    silent: bool = False

    @property
    def waits(self) -> bool:
        return self.parked or self.waiting != 0


class Verdict(NamedTuple):
    """Who is to go, none when that would not help, and why."""

    ranks: tuple[int, ...]
    reason: str


def culprit(standings: Sequence[Standing]) -> Verdict:
    """The verdict on all ranks of a job that stands still."""
    silent = tuple(s.rank for s in standings if s.silent)
    if silent:
        return Verdict(silent, "no Python runs in it")
    waiting = [s for s in standings if s.waits]
    if not waiting:
        return Verdict((), "no rank waits in a collective: all of them compute")
    blamers = _blamers(standings)
    by_rank = {s.rank: s for s in standings}
    roots = tuple(sorted(rank for rank in blamers if not by_rank[rank].waits))
    if roots:
        return Verdict(roots, _missing(len(blamers[roots[0]])))
    odd = _odd(standings)
    if odd:
        return Verdict(odd, "entered another collective than the others of its group")
    if not blamers:
        busy = tuple(sorted(s.rank for s in standings if not s.waits))
        if busy:
            return Verdict(busy, f"does not wait for the others, as {_count(len(waiting))} {_do(len(waiting))}")
        lowest = min(s.rank for s in waiting)
        return Verdict(
            (lowest,), "all ranks wait in the same collective, so a connection is dead; this one is the lowest"
        )

    def guilt(rank: int) -> tuple[bool, int, int, int]:
        ahead = any(_place(by_rank[rank]) > _place(by_rank[blamer]) for blamer in blamers[rank])
        return ahead, len(blamers[rank]), -sum(by_rank[rank].calls.values()), -rank

    worst = max(blamers, key=guilt)
    return Verdict((worst,), _missing(len(blamers[worst])))


def _blamers(standings: Sequence[Standing]) -> dict[int, list[int]]:
    """By rank who blames it: those that wait in a group (parked: in any of theirs) of which it has entered fewer."""
    known: dict[tuple[int, int], list[int]] = {}
    blamers: dict[int, list[int]] = {}
    for blamer in standings:
        if not blamer.waits:
            continue
        keys = set(blamer.calls) if blamer.parked else {blamer.waiting} & blamer.calls.keys()
        blamed: set[int] = set()
        for key in keys:
            calls = blamer.calls[key]
            if (key, calls) not in known:
                known[key, calls] = [s.rank for s in standings if s.calls.get(key, calls) < calls]
            blamed.update(known[key, calls])
        for rank in blamed:
            blamers.setdefault(rank, []).append(blamer.rank)
    return blamers


def _odd(standings: Sequence[Standing]) -> tuple[int, ...]:
    """In the first group in which all members wait, but not all in the same collective, those that differ."""
    for key in sorted({key for s in standings for key in s.calls}):
        members = [s for s in standings if key in s.calls]
        if all(s.parked or s.waiting == key for s in members):
            classes: dict[tuple[int, int], list[Standing]] = {}
            for s in members:
                classes.setdefault((s.calls[key], s.last.get(key, 0)), []).append(s)
            if len(classes) > 1:
                worst = max(classes.values(), key=lambda c: (-len(c), _place(c[0]), -c[0].calls[key], -c[0].rank))
                return tuple(s.rank for s in worst)
    return ()


def _place(standing: Standing) -> tuple[int, int]:
    return standing.step, standing.phase


def _missing(ranks: int) -> str:
    return f"did not enter the collective that {_count(ranks)} {'waits' if ranks == 1 else 'wait'} in"


def _do(ranks: int) -> str:
    return "does" if ranks == 1 else "do"


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
