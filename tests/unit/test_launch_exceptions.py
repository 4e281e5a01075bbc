"""The state machine of a job and processes that hold an exception, or leave by decision of the script."""

from __future__ import annotations

import pytest

from leto_elastic import wire
from leto_elastic.launch.actions import Action, Emit, End, HandOver, Report, Send, Spawn, Surrender, Warn
from leto_elastic.launch.world import PlanView
from leto_elastic.recovery.policy import FailureClass
from tests.unit.test_launch_job import STORE, Told, events, of

WHY = "ValueError: bad batch"


def raised(told: Told, key: int, epoch: int = 0, reason: str = WHY, *, oom: bool = False) -> list[Action]:
    actions = told.job.raised(key, wire.Raised(step=4, epoch=epoch, reason=reason, oom=oom), 1.0)
    told.job.parked(key, 1.0)
    return actions


def fail(told: Told, epoch: int, reason: str = "why") -> list[Action]:
    return told.job.plan(PlanView(epoch, "fail", {}, STORE, reason), 2.0)


def test_it_is_told_like_a_death() -> None:
    told = Told().parked()
    actions = raised(told, 1)
    assert of(Send, actions) == [Send(0, wire.Abort(0)), Send(1, wire.Abort(0)), Send(2, wire.Abort(0))]
    (report,) = of(Report, actions)
    assert (report.epoch, report.death.rank, report.death.cause, report.death.held) == (0, 1, "exception", True)
    assert report.death.detail == WHY
    assert events(actions) == ["failure"]
    assert of(Warn, actions) == [], "its shadow may not be needed"


def test_equal_errors_have_equal_digests() -> None:
    told = Told().parked()
    (first,) = of(Report, raised(told, 0))
    (second,) = of(Report, raised(told, 1))
    (third,) = of(Report, raised(told, 2, reason="ValueError: another"))
    assert first.death.digest == second.death.digest != third.death.digest
    dying = Told().parked()
    dying.job.failing(0, WHY)
    (report,) = of(Report, dying.job.exited(0, 1, 1.0))
    assert (report.death.digest, report.death.held) == (first.death.digest, False)
    (killed,) = of(Report, dying.job.exited(1, -9, 1.0))
    assert killed.death.digest == ""


def test_out_of_memory_is_a_class_of_its_own() -> None:
    (report,) = of(Report, raised(Told().parked(), 1, oom=True))
    assert report.death.cause is FailureClass.OOM


def test_to_retry_it_gets_the_plan_as_a_survivor() -> None:
    told = Told().parked()
    raised(told, 1)
    actions = told.plan(1, s1="retry")
    assert of(HandOver, actions) == []
    assert of(Send, actions) == [Send(key, wire.Plan(1, STORE)) for key in (0, 1, 2)]
    settled = told.commit_all(1, 0, 1, 2)
    (recovery,) = of(Emit, settled)
    assert (recovery.fields["action"], recovery.fields["ranks"]) == ("retry", [1])
    assert recovery.fields["pids"] == {"1": 101}, "the same process"
    (report,) = of(Report, told.job.exited(1, 1, 3.0))
    assert report.death.cause is FailureClass.EXIT, "what it held is forgotten"


def test_to_promote_it_ends_first_and_that_is_no_failure() -> None:
    told = Told().parked()
    raised(told, 1)
    assert told.plan(1, s1="promote") == [Surrender(1)], "nobody goes on before it has ended"
    actions = told.job.exited(1, 1, 2.0)
    assert of(Report, actions) == []
    assert events(actions) == []
    assert of(HandOver, actions) == [HandOver(4, wire.Promote(1, 0, STORE))]
    assert [send.key for send in of(Send, actions)] == [0, 2]


def test_to_respawn_both_are_awaited() -> None:
    told = Told(shadows=False)
    told.protect()
    raised(told, 1)
    assert told.plan(1, s1="respawn") == [Surrender(1), Spawn(1, "respawn")]
    key = told.standby(1, "respawn", ready=False)
    told.job.rehearsed(key)
    assert of(HandOver, told.job.ready(key, 2.0)) == []
    assert len(of(HandOver, told.job.exited(1, 1, 2.0))) == 1


def test_to_fail_the_job_ends_when_all_that_hold_one_have_ended() -> None:
    told = Told().parked()
    raised(told, 1)
    raised(told, 2)
    assert fail(told, 1) == [Surrender(1), Surrender(2)]
    assert told.job.ending == "why"
    assert told.job.exited(0, -15, 2.0) == []
    assert told.plan(2, s1="retry") == []
    assert told.job.exited(2, 1, 2.0) == []
    assert told.job.exited(1, 1, 2.0) == [End("why")]


def test_one_that_raises_while_the_job_ends_is_awaited_too() -> None:
    told = Told().parked()
    raised(told, 1)
    fail(told, 1)
    assert of(Surrender, raised(told, 2)) == [Surrender(2)]
    assert told.job.exited(1, 1, 2.0) == []
    assert told.job.exited(2, 1, 2.0) == [End("why")]


@pytest.mark.parametrize("planned", [False, True])
def test_one_that_is_killed_while_it_holds_is_a_failure_of_its_own(planned: bool) -> None:
    """Its first record, of the exception, is there already, so the second one is of the next epoch."""
    told = Told().parked()
    raised(told, 1)
    if planned:
        told.job.exited(0, -9, 1.0)
        told.plan(1, s1="retry")  # made without rank 0, so nobody goes yet
        actions = told.job.exited(1, -9, 2.0)
    else:
        told.job.exited(1, -9, 2.0)
        actions = told.plan(1, s1="retry")
    (report,) = of(Report, actions)
    assert (report.epoch, report.death.rank, report.death.cause) == (1, 1, FailureClass.SIGNAL)
    assert of(Send, actions) == []
    repairs = {"s0": "promote"} if planned else {}
    assert HandOver(4, wire.Promote(2, 0, STORE)) in told.plan(2, s1="promote", **repairs)


def test_another_rank_dies_while_one_holds() -> None:
    told = Told().parked()
    raised(told, 1)
    told.job.exited(2, -9, 1.0)
    actions = told.plan(1, s1="retry")
    assert [(report.epoch, report.death.rank) for report in of(Report, actions)] == [(1, 2)]
    assert of(Send, actions) == []
    actions = told.plan(2, s2="promote")
    assert of(Send, actions) == [Send(0, wire.Plan(2, STORE)), Send(1, wire.Plan(2, STORE))]


def test_a_shadow_that_dies_before_the_surrendered_process_has_ended() -> None:
    told = Told().parked()
    raised(told, 1)
    told.plan(1, s1="promote")
    (report,) = of(Report, told.job.exited(4, -9, 2.0))
    assert (report.epoch, report.death.rank) == (1, 1)
    assert of(Surrender, told.plan(2, s1="respawn")) == [], "once is enough"
    assert told.job.exited(1, 1, 2.0) == []
    key = told.standby(1, "respawn", ready=False)
    told.job.rehearsed(key)
    assert len(of(HandOver, told.job.ready(key, 2.0))) == 1


def test_raised_in_an_epoch_that_it_was_already_told_to_leave() -> None:
    """The plan is in its inbox: it goes on by that, and raises again if it must."""
    told = Told().parked()
    told.job.exited(1, -9, 1.0)
    told.plan(1, s1="promote")
    assert raised(told, 2, epoch=0) == []
    assert of(Report, raised(told, 2, epoch=1))


def test_before_the_first_commit_it_ends_and_so_does_the_job() -> None:
    told = Told()
    assert raised(told, 1) == [Surrender(1)]
    actions = told.job.exited(1, 1, 2.0)
    (end,) = of(End, actions)
    assert end.reason == f"rank 1 ended (exit code 1): {WHY} before every rank had committed its first step"


def test_the_step_to_step_over_goes_with_the_plan() -> None:
    told = Told().parked()
    raised(told, 1)
    told.job.exited(2, -9, 1.0)
    view = PlanView(1, "repair", {1: "retry", 2: "promote"}, STORE, "", skip=4)
    actions = told.job.plan(view, 2.0)
    assert {send.message.skip for send in of(Send, actions)} == {4}
    assert {hand_over.message.skip for hand_over in of(HandOver, actions)} == {4}


def test_a_step_that_was_stepped_over_is_told_once() -> None:
    told = Told().parked()
    (event,) = told.job.skipped(4, "why")
    assert event == Emit("skipped", {"step": 4, "reason": "why", "total": 1})
    assert told.job.skipped(4, "why") == []
    (event,) = told.job.skipped(7, "why")
    assert isinstance(event, Emit)
    assert event.fields["total"] == 2


# ---- leaving


@pytest.mark.parametrize("code", [1, 3, -2])
def test_a_rank_that_quits_ends_the_job(code: int) -> None:
    told = Told().parked()
    told.job.quitting(1, "left")
    assert told.job.exited(1, code, 1.0) == [End("left")]


def test_all_ranks_may_leave_with_exit_code_0() -> None:
    told = Told(2).parked()
    for rank in range(2):
        told.job.quitting(rank, "left")
    assert told.job.exited(0, 0, 1.0) == []
    assert told.job.exited(1, 0, 1.0) == [End(None)]


def test_one_that_leaves_alone_ends_the_job() -> None:
    told = Told(2).parked()
    told.job.quitting(0, "left")
    assert told.job.exited(0, 0, 1.0) == []
    assert told.job.parked(1, 1.0) == [End("left")]
    told = Told(2).parked()
    told.job.quitting(0, "left")
    told.job.exited(0, 0, 1.0)
    assert of(End, told.job.exited(1, -9, 1.0)) == [End("left")]
