"""Who takes part in an epoch, and where: the nodes by position, the ranks on each, and the plan that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from leto_elastic import wire
from leto_elastic.coordinator.schema import Seat
from leto_elastic.errors import ConfigError
from leto_elastic.launch.actions import Death
from leto_elastic.protect.placement import choose_code
from leto_elastic.recovery.policy import Policy

_WIDEST = 8
"""Data pieces of a stripe when the policy leaves it open."""


@dataclass(frozen=True, slots=True)
class World:
    """The nodes of a job.

    Args:
        seats: by position; a node that takes a lost one's place takes its position, and so its ranks.
        position: of this node, None for a spare.
        generation: see `leto_elastic.state.header.tag_of`.
    """

    seats: tuple[Seat, ...]
    position: int | None
    generation: int = 0

    @classmethod
    def alone(cls, slots: int) -> World:
        """One node."""
        return cls((Seat(node="alone", slots=slots),), 0)

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return sum(seat.slots for seat in self.seats)

    def ranks(self, position: int) -> range:
        """Ranks of the node at a position."""
        first = sum(seat.slots for seat in self.seats[:position])
        return range(first, first + self.seats[position].slots)

    @property
    def own(self) -> range:
        """Ranks of this node; none for a spare."""
        return range(0) if self.position is None else self.ranks(self.position)


@dataclass(frozen=True, slots=True)
class PlanView:
    """Of a plan, what an agent needs. `repairs`: action by rank; `deaths`: what it covers; `skip`: see `wire.Plan`."""

    epoch: int
    action: Literal["start", "repair", "restart", "finish", "fail"]
    repairs: Mapping[int, str]
    store: wire.StoreAddress
    reason: str
    world: World = field(default_factory=lambda: World.alone(0))
    deaths: tuple[Death, ...] = ()
    skip: int = -1


def met(plan: PlanView) -> PlanView:
    """What a node begins with that finds `plan` when it comes.

    A plan may have given it a lost node's place as soon as it was known to be there. That place is not one to begin
    the training in: the node is the spare that it was then, and is to hear of the plan as such.
    """
    if plan.action in ("start", "restart") or plan.world.position is None:
        return plan
    return replace(plan, epoch=plan.epoch - 1, world=replace(plan.world, position=None))


def code_of(policy: Policy, seats: Sequence[Seat]) -> tuple[int, int] | None:
    """RS(data, parity) over these nodes as the policy wants it, None for none.

    Raises ConfigError, with the numbers, when there are too few nodes for it.
    """
    wanted = policy.protect.global_
    domains = len({seat.place for seat in seats})
    if wanted.parity == 0 or domains < 2:
        return None
    data = wanted.data or max(1, min(_WIDEST, domains - wanted.parity))
    try:
        return choose_code(data, wanted.parity, domains).code
    except ValueError as error:
        raise ConfigError(f"protect.global: {error}") from error


def position_among(seats: Sequence[Seat], node: str) -> int | None:
    """The position of a node, None when it has none."""
    return next((position for position, seat in enumerate(seats) if seat.node == node), None)
