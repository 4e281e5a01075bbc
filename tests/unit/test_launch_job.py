"""The state machine of a job, told event by event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from leto_elastic import wire
from leto_elastic.launch.actions import (
    Action,
    Emit,
    End,
    HandOver,
    Hurry,
    Kill,
    Publish,
    Report,
    Restart,
    Send,
    Settled,
    Spawn,
    Warn,
)
from leto_elastic.launch.job import Job
from leto_elastic.launch.slots import Blob
from leto_elastic.launch.world import PlanView
from leto_elastic.state.header import Phase, Position

STORE = wire.StoreAddress("127.0.0.1", 1)


@dataclass
class FakeHeader:
    position: Position = field(default_factory=lambda: Position(4, Phase.COMPUTE))
    valid: bool = True
    last_words: float = 0.0


@dataclass
class FakeHeld:
    fds: dict[str, int] = field(default_factory=lambda: {"header": 50, "weights": 51})
    sizes: dict[str, int] = field(default_factory=lambda: {"header": 4096, "weights": 100})
    header: Any = field(default_factory=FakeHeader)


class Told:
    """A job of `world` ranks, and short ways to tell it what happens. Trainer of rank r has key r; standbys follow."""

    def __init__(self, world: int = 3, *, leto: bool = True, shadows: bool = True, restarts: int = 0) -> None:
        self.held = [FakeHeld() for _ in range(world)]
        self.job = Job(self.held, shadows=shadows, restarts_left=restarts)
        self.world = world
        self.last = world - 1
        for rank in range(world):
            self.job.started(rank, rank, "trainer", 100 + rank)
            if leto:
                self.job.greeted(rank)

    def protect(self) -> list[Action]:
        actions: list[Action] = []
        for rank in range(self.world):
            actions += self.job.recorded(rank, Blob(10 + rank, 1))
            actions += self.job.laid_out(rank, Blob(20 + rank, 7, version=0))
        for rank in range(self.world):
            actions += self.job.committed(rank, wire.Committed(0, 1, "start", {}), 0.0)
        return actions

    def standby(self, slot: int, kind: Any = "shadow", *, ready: bool = True) -> int:
        self.last += 1
        self.job.started(self.last, slot, kind, 100 + self.last)
        self.job.greeted(self.last)
        if ready:
            self.job.rehearsed(self.last)
            self.job.ready(self.last, 0.0)
        return self.last

    def parked(self) -> Told:
        self.protect()
        for slot in range(self.world):
            assert self.standby(slot) == self.world + slot
        return self

    def plan(self, epoch: int, **repairs: str) -> list[Action]:
        by_slot = {int(name[1:]): action for name, action in repairs.items()}
        return self.job.plan(PlanView(epoch, "repair", by_slot, STORE, ""), 2.0)

    def commit_all(self, epoch: int, *keys: int) -> list[Action]:
        actions: list[Action] = []
        for key in keys:
            actions += self.job.committed(key, wire.Committed(epoch, 5, "rerun", {}), 3.0)
        return actions


def of(kind: type, actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def events(actions: list[Action]) -> list[str]:
    return [action.event for action in of(Emit, actions)]


def test_shadows_start_when_every_slot_is_protected_and_not_before() -> None:
    told = Told(2)
    told.job.recorded(0, Blob(1, 1))
    assert told.job.laid_out(0, Blob(2, 1)) == [Publish(0)]
    told.job.recorded(1, Blob(3, 1))
    actions = told.job.laid_out(1, Blob(4, 1))
    assert of(Spawn, actions) == [Spawn(0, "shadow"), Spawn(1, "shadow")]
    assert of(Spawn, told.job.shadows_wanted()) == [], "they are on their way"


def test_no_shadows_by_policy() -> None:
    assert of(Spawn, Told(2, shadows=False).protect()) == []


def test_a_death_aborts_first_and_then_reports() -> None:
    told = Told().parked()
    actions = told.job.exited(1, -9, 1.0)
    assert actions[:3] == [Send(0, wire.Abort(0)), Send(2, wire.Abort(0)), actions[2]]
    (report,) = of(Report, actions)
    assert (report.epoch, report.death.rank, report.death.cause, report.death.step) == (0, 1, "signal", 4)
    assert report.death.phase == "compute"


def test_a_second_death_in_an_aborted_epoch_does_not_abort_again() -> None:
    told = Told().parked()
    told.job.exited(1, -9, 1.0)
    actions = told.job.exited(2, -9, 1.0)
    assert of(Send, actions) == []
    assert of(Warn, actions) == [Warn(5)], "its shadow is warned"
    assert len(of(Report, actions)) == 1


def test_a_plan_promotes_and_tells_the_survivors() -> None:
    told = Told().parked()
    told.job.exited(1, -9, 1.0)
    actions = told.plan(1, s1="promote")
    assert actions[:3] == [
        HandOver(4, wire.Promote(1, 0, STORE)),
        Send(0, wire.Plan(1, STORE)),
        Send(2, wire.Plan(1, STORE)),
    ]
    settled = told.commit_all(1, 0, 4, 2)
    assert of(Settled, settled) == [Settled(1)]
    (recovery,) = of(Emit, settled)
    assert recovery.fields["action"] == "promote"
    assert recovery.fields["stall_ms"] == 2000.0
    assert of(Spawn, settled) == [Spawn(1, "shadow")]


def test_a_parked_shadow_gets_newer_segments_at_once_and_not_at_its_promotion() -> None:
    told = Told().parked()
    (attach,) = told.job.laid_out(1, Blob(99, 8, version=3))
    assert attach == Send(4, wire.Attach(3, 8, ["header", "weights"], [4096, 100]), (99, 50, 51))
    told.job.exited(1, -9, 1.0)
    first, *_ = told.plan(1, s1="promote")
    assert first == HandOver(4, wire.Promote(1, 3, STORE))


def test_survivors_wait_until_a_respawned_process_is_ready() -> None:
    told = Told(shadows=False)
    told.protect()
    told.job.exited(1, 1, 1.0)
    assert told.plan(1, s1="respawn") == [Spawn(1, "respawn")]
    key = told.standby(1, "respawn", ready=False)
    assert of(Send, told.job.rehearsed(key))[0].message.names == ["header", "weights"]
    actions = told.job.ready(key, 2.0)
    assert of(HandOver, actions) == [HandOver(key, wire.Promote(1, 0, STORE))]
    assert [send.key for send in of(Send, actions)] == [0, 2]


def test_a_shadow_that_is_still_starting_is_hurried_instead_of_starting_another() -> None:
    told = Told()
    told.protect()
    key = told.standby(1, ready=False)
    told.job.exited(1, -9, 1.0)
    assert told.plan(1, s1="respawn") == [Hurry(key)]


def test_a_shadow_asked_for_but_not_yet_started_is_hurried_when_it_starts() -> None:
    told = Told()
    told.protect()
    told.job.exited(1, -9, 1.0)
    assert told.plan(1, s1="respawn") == []
    assert of(Hurry, told.job.started(9, 1, "shadow", 109)) == [Hurry(9)]


def test_a_plan_to_promote_a_shadow_that_has_died_since_respawns() -> None:
    told = Told().parked()
    told.job.exited(1, -9, 1.0)
    assert of(Spawn, told.job.exited(4, -9, 1.0)) == [], "no new shadow amid a recovery"
    assert told.plan(1, s1="promote") == [Spawn(1, "respawn")]


def test_a_plan_that_misses_a_death_is_not_executed_and_the_death_is_reported_again() -> None:
    told = Told().parked()
    told.job.exited(1, -9, 1.0)
    told.job.exited(2, -9, 1.0)
    actions = told.plan(1, s1="promote")
    assert of(HandOver, actions) == []
    assert of(Send, actions) == []
    assert [(report.epoch, report.death.rank) for report in of(Report, actions)] == [(1, 2)]
    actions = told.plan(2, s2="promote")
    assert [action.key for action in of(HandOver, actions)] == [4, 5], "both ranks, in the newest epoch"
    assert {action.message.epoch for action in of(HandOver, actions)} == {2}
    assert of(Send, actions) == [Send(0, wire.Plan(2, STORE))]


def test_a_death_in_an_epoch_that_is_being_built_aborts_it() -> None:
    told = Told().parked()
    told.job.exited(1, -9, 1.0)
    told.plan(1, s1="promote")
    told.job.committed(0, wire.Committed(1, 5, "rerun", {}), 2.0)
    actions = told.job.exited(2, -9, 2.0)
    assert of(Send, actions) == [Send(0, wire.Abort(1)), Send(4, wire.Abort(1))]
    assert told.job.committed(4, wire.Committed(1, 5, "rerun", {}), 2.0) == [], "an aborted epoch is never settled"
    assert [action.key for action in of(HandOver, told.plan(2, s2="promote"))] == [5]
    settled = told.commit_all(2, 0, 4, 5)
    (recovery,) = of(Emit, settled)
    assert recovery.fields["ranks"] == [1, 2]
    assert recovery.fields["epoch"] == 2


def test_a_process_that_waits_to_be_promoted_and_dies_is_a_failure_of_its_rank() -> None:
    told = Told(shadows=False)
    told.protect()
    told.job.exited(1, -9, 1.0)
    told.plan(1, s1="respawn")
    key = told.standby(1, "respawn", ready=False)
    actions = told.job.exited(key, -9, 2.0)
    assert [(report.epoch, report.death.rank) for report in of(Report, actions)] == [(1, 1)]
    assert of(Send, actions) == [], "the survivors wait for a plan already"
    assert told.plan(2, s1="respawn") == [Spawn(1, "respawn")]


def test_old_plans_and_old_commits_change_nothing() -> None:
    told = Told().parked()
    told.job.exited(1, -9, 1.0)
    told.plan(1, s1="promote")
    assert told.plan(1, s1="promote") == []
    assert told.job.committed(0, wire.Committed(0, 5, "rerun", {}), 2.0) == []


def test_end_by_plan() -> None:
    told = Told().parked()
    told.job.exited(1, -9, 1.0)
    assert told.job.plan(PlanView(1, "fail", {}, STORE, "why"), 2.0) == [End("why")]
    assert told.job.exited(0, -9, 2.0) == [], "nothing matters any more"


@pytest.mark.parametrize(
    ("code", "failing", "cause"), [(0, None, "exit"), (3, None, "exit"), (1, "boo", "exception"), (-11, None, "signal")]
)
def test_causes(code: int, failing: str | None, cause: str) -> None:
    told = Told().parked()
    if failing is not None:
        told.job.failing(1, failing)
    (report,) = of(Report, told.job.exited(1, code, 1.0))
    assert report.death.cause == cause


def test_success_needs_every_rank() -> None:
    told = Told(2).parked()
    told.job.finish(0)
    told.job.finish(1)
    assert told.job.exited(0, 0, 1.0) == []
    assert of(Spawn, told.job.exited(2, 0, 1.0)) == [], "no more shadows"
    assert told.job.exited(1, 0, 1.0) == [End(None)]


def test_a_rank_killed_after_its_last_step_is_replaced_alone_and_once() -> None:
    told = Told(2).parked()
    told.job.finish(0)
    actions = told.job.exited(0, -9, 1.0)
    assert of(Report, actions) == [], "no epoch is planned any more"
    assert of(Send, actions) == [Send(1, wire.Abort(0)), Send(1, wire.Release())]
    (hand_over,) = of(HandOver, actions)
    assert (hand_over.key, hand_over.message.store.port) == (2, 0)
    told.job.finish(1)
    (end,) = of(End, told.job.exited(2, -9, 2.0))
    assert end.reason == "rank 0 ended (signal 9) after the training was over"


def test_a_rank_that_left_the_loop_ends_a_recovery_that_it_cannot_join() -> None:
    """Rank 0 dies in the barrier after the last step; rank 1 had passed it, which the agent learns a moment later."""
    told = Told(2).parked()
    told.job.exited(0, -9, 1.0)
    actions = told.job.finish(1)
    (hand_over,) = of(HandOver, actions)
    assert (hand_over.key, hand_over.message.store.port) == (2, 0)
    assert told.plan(1, s0="promote") == []
    assert told.job.exited(1, 0, 2.0) == []
    told.job.finish(2)
    assert told.job.exited(2, 0, 2.0) == [End(None)]


def test_a_failure_after_the_training_ends_the_job() -> None:
    told = Told(2).parked()
    told.job.finish(0)
    (end,) = of(End, told.job.exited(0, 1, 1.0))
    assert end.reason == "rank 0 ended (exit code 1) after the training was over"


def test_plain_scripts_are_restarted_as_a_group_and_only_so_often() -> None:
    told = Told(2, leto=False, restarts=1)
    assert of(Restart, told.job.exited(1, 3, 1.0)) == [Restart("rank 1 ended (exit code 3), 0 restarts left")]
    told = Told(2, leto=False)
    assert of(End, told.job.exited(1, 3, 1.0)) == [End("rank 1 ended (exit code 3)")]
    told = Told(2, leto=False)
    assert told.job.exited(1, 0, 1.0) == []
    assert told.job.exited(0, 0, 1.0) == [End(None)]


def test_shadows_are_given_up_while_memory_is_short() -> None:
    told = Told(2).parked()
    actions = told.job.memory("1 MiB left")
    assert of(Kill, actions) == [Kill(2), Kill(3)]
    assert events(actions) == ["shadow_given_up", "shadow_given_up"]
    assert of(Spawn, told.job.exited(2, -9, 1.0)) == []
    told.job.exited(3, -9, 1.0)
    assert told.job.memory("1 MiB left") == []
    assert of(Spawn, told.job.memory(None)) == [Spawn(0, "shadow"), Spawn(1, "shadow")]


def test_memory_never_takes_a_process_that_is_to_be_promoted() -> None:
    told = Told(2, shadows=False)
    told.protect()
    told.job.exited(1, -9, 1.0)
    told.plan(1, s1="respawn")
    told.standby(1, "respawn", ready=False)
    assert of(Kill, told.job.memory("short")) == []


def test_unfit_shadows_are_not_tried_again_until_the_trainer_changes() -> None:
    told = Told(2)
    told.protect()
    key = told.standby(1, ready=False)
    assert events(told.job.unfit(key, "why")) == ["shadow_unfit"]
    assert of(Spawn, told.job.exited(key, 0, 1.0)) == []
    assert told.job.slots[1].shadow == "unfit"


def test_last_words_tell_when_a_worker_died() -> None:
    told = Told().parked()
    told.held[1].header.last_words = 0.75
    told.job.exited(1, -9, 1.0)
    told.plan(1, s1="promote")
    (recovery,) = of(Emit, told.commit_all(1, 0, 4, 2))
    assert recovery.fields["phases_ms"]["detect"] == 250.0
    assert recovery.fields["stall_ms"] == 2250.0
    assert told.held[1].header.last_words == 0.0, "not blamed for the next death"
