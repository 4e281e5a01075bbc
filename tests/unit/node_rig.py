"""A node of a job, as its state machine sees it: node 1 of three, with ranks 2 and 3, unless something else is said.

The trainer of slot i has key i; standbys follow.
"""

from __future__ import annotations

from collections.abc import Mapping

from leto_elastic import wire
from leto_elastic.coordinator.schema import Seat
from leto_elastic.launch.actions import Action, Death, HandOver, Kind, Report, Send
from leto_elastic.launch.job import Job
from leto_elastic.launch.slots import Blob
from leto_elastic.launch.world import PlanView, World
from leto_elastic.recovery.policy import FailureClass
from tests.unit.test_launch_job import STORE, FakeHeld, of

SEATS = tuple(Seat(node=name, slots=2) for name in "abc")
SLOTS = 2


def death(rank: int, cause: FailureClass = FailureClass.SIGNAL, step: int = 4) -> Death:
    return Death(rank, rank, 1, -9, cause, step, "compute", 0)


def seats(**placed: str) -> tuple[Seat, ...]:
    """The nodes, some of them in the place of lost ones: `b="d"` puts d where b was."""
    return tuple(Seat(node=placed.get(seat.node, seat.node), slots=SLOTS) for seat in SEATS)


class Node:
    """An agent's view of the job; `position` None: it is a spare."""

    def __init__(self, position: int | None = 1, *, shadows: bool = True, leto: bool = True) -> None:
        self.position = position
        self.held = [FakeHeld() for _ in range(SLOTS)]
        self.job = Job(self.held, shadows=shadows, restarts_left=5, world=World(SEATS, position))
        self.last = SLOTS - 1
        for index in range(SLOTS if position is not None else 0):
            self.job.started(index, index, "trainer", 100 + index)
            if leto:
                self.job.greeted(index)

    def protect(self) -> list[Action]:
        """Until the first commit of every rank."""
        actions: list[Action] = []
        for index in range(SLOTS):
            actions += self.job.recorded(index, Blob(10 + index, 1))
            actions += self.job.laid_out(index, Blob(20 + index, 7, version=0))
        for index in range(SLOTS):
            actions += self.job.committed(index, wire.Committed(0, 1, "start", {}), 0.0)
        return actions

    def standby(self, slot: int, kind: Kind = "shadow", *, ready: bool = True) -> int:
        self.last += 1
        self.job.started(self.last, slot, kind, 100 + self.last)
        self.job.greeted(self.last)
        if ready:
            self.job.rehearsed(self.last)
            self.job.ready(self.last, 0.0)
        return self.last

    def plan(
        self,
        epoch: int,
        repairs: Mapping[int, str],
        *deaths: Death,
        nodes: tuple[Seat, ...] = SEATS,
        generation: int = 0,
        place: int | None = None,
    ) -> list[Action]:
        position = self.position if place is None else place
        world = World(nodes, position, generation)
        return self.job.plan(PlanView(epoch, "repair", repairs, STORE, "", world, deaths), 2.0)

    def short(self, epoch: int, action: str, reason: str = "") -> list[Action]:
        """A plan without repairs."""
        plan = PlanView(epoch, action, {}, STORE, reason, World(SEATS, self.position))  # type: ignore[arg-type]
        return self.job.plan(plan, 2.0)

    def parked(self, *keys: int) -> list[Action]:
        return [action for key in keys for action in self.job.parked(key, 2.0)]

    def restored(
        self, epoch: int, version: int | None = None, manifests: Mapping[int, Blob] | None = None
    ) -> list[Action]:
        return self.job.restored(epoch, version, manifests or {}, 2.0)

    def commit_all(self, epoch: int, *keys: int, step: int = 5) -> list[Action]:
        actions: list[Action] = []
        for key in keys:
            actions += self.job.committed(key, wire.Committed(epoch, step, "rerun", {}), 3.0)
        return actions


def running(*, shadows: bool = True) -> Node:
    """In the middle of training; with shadows, these are ready: key 2 for slot 0, key 3 for slot 1."""
    node = Node(shadows=shadows)
    node.protect()
    for slot in range(SLOTS if shadows else 0):
        node.standby(slot)
    return node


def reported(actions: list[Action]) -> list[tuple[int, int, str]]:
    return [(report.epoch, report.death.rank, report.death.cause) for report in of(Report, actions)]


def launches(actions: list[Action]) -> list[Action]:
    """What makes a process take part in an epoch."""
    plans = [send for send in of(Send, actions) if isinstance(send.message, wire.Plan)]
    return [*of(HandOver, actions), *plans]
