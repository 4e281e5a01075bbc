"""With which step everyone goes on after a failure: a pure function of where each rank stood.

What it guarantees, given that a rank enters UPDATE(s) only after every rank's VOTE(s):

* A step that one rank has begun to apply is completed by all (*forward*): its gradients are whole everywhere.
* A step that nobody has begun to apply is run again by all (*rerun*), from the same batch and random numbers.
* So no step is lost and none is applied twice, and all ranks come to the same result from the same positions,
  without asking anyone.

`VOTE(s)` on every rank does not prove that the vote passed, and it does not matter: nobody has touched the parameters,
so the step is run again. Rejected: recording the vote's outcome separately, which would save that rerun at the price
of a second store that must be kept in order with the phase.

Sections (work registered with `state.every`, run between two steps) are not transactions: a section that some rank has
not left is entered again by all ranks, also by those that had left it.

A rank that resolves must write its new position (`COMPUTE(step)`, or `SECTION(step, section)`) before it does anything
for it; a failure at any point of that gives the same resolution again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from leto_elastic.errors import StateError
from leto_elastic.state.header import Phase, Position


class Resolution(msgspec.Struct, frozen=True):
    """What each rank does.

    Args:
        step: the step that all ranks run next.
        action: per rank, "forward" (apply step - 1, whose gradients are whole, and commit it) or "rerun" (go back to
            the start of `step`, which for a rank that stands there means to do nothing).
        section: index of the first section before `step` that all ranks run again, None for no section.
    """

    step: int
    action: Mapping[int, Literal["forward", "rerun"]]
    section: int | None


def resolve(positions: Mapping[int, Position]) -> Resolution:
    """The resolution for the given position of every rank.

    Raises:
        StateError: no run of the protocol leads to these positions (or there are none); naming ranks and positions.
    """
    if not positions:
        raise StateError("no position of any rank to resolve from")
    step = max(_reached(position) for position in positions.values())
    action: dict[int, Literal["forward", "rerun"]] = {}
    for rank, position in sorted(positions.items()):
        if position.step == step and position.phase is not Phase.SETUP:
            action[rank] = "rerun"
        elif position.step == step - 1 and position.phase in (Phase.VOTE, Phase.UPDATE):
            action[rank] = "forward"
        else:
            raise StateError(
                f"rank {rank} stands at {describe(position)}, which no failure can leave behind while the job is at "
                f"step {step} (all ranks: {_all(positions)}); its state cannot be trusted, restart from a checkpoint"
            )
    pending = [_section(step, position) for position in positions.values()]
    return Resolution(step, action, min((index for index in pending if index is not None), default=None))


def _reached(position: Position) -> int:
    """The step whose start this rank proves to be reachable by all."""
    return position.step + 1 if position.phase is Phase.UPDATE else position.step


def _section(step: int, position: Position) -> int | None:
    """The first section before `step` that this rank has not left; None when it has left all."""
    if position.step < step:
        return 0
    return position.chunk if position.phase is Phase.SECTION else None


def describe(position: Position) -> str:
    """Such as `UPDATE(7, chunk 3, torn)`."""
    detail = ""
    if position.phase is Phase.UPDATE:
        detail = f", chunk {position.chunk}" + (", torn" if position.torn else "")
    elif position.phase is Phase.SECTION:
        detail = f", section {position.chunk}"
    return f"{position.phase.name}({position.step}{detail})"


def _all(positions: Mapping[int, Position]) -> str:
    return ", ".join(f"{rank}: {describe(position)}" for rank, position in sorted(positions.items()))
