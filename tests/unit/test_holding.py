"""Exceptions of a body and numbers gone bad, in the process: what is told, what is waited for, what is applied."""

from __future__ import annotations

import math
import traceback
from typing import Any

import msgspec
import pytest
import torch

from leto_elastic import wire
from leto_elastic.errors import CommunicatorLost, LetoError, NotFinite
from leto_elastic.recovery.policy import Action, FailureClass, Policy, StepPolicy
from leto_elastic.state.header import Phase, Position
from leto_elastic.worker import numbers
from leto_elastic.worker.link import Delivery
from tests.unit.test_runner import Job, Link, at_words

STORE = wire.StoreAddress(host="", port=1)
RETRY = (Action.RETRY, Action.PROMOTE, Action.FAIL)


class Agent(Link):
    """Answers a process that holds an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.holding = False
        self.answers: list[wire.FromAgent] = []
        self.aborted: list[int] = []

    def wait(self, kinds: Any, deadline: float | None, what: str) -> Delivery:
        assert self.holding
        assert self.aborted, "peers would wait for this rank for as long as it holds"
        if not self.answers:
            raise LetoError(f"waited {deadline:g} s")
        return Delivery(self.answers.pop(0), [])


class Raising(Job):
    """A job whose step 2 raises so many times."""

    def __init__(self, times: int, *answers: wire.FromAgent, ladder: tuple[Action, ...] = RETRY) -> None:
        super().__init__()
        self.agent = Agent()
        self.agent.answers = list(answers)
        self.session.link = self.agent
        self.session.fabric.abort = lambda epoch, reason: self.agent.aborted.append(epoch)  # type: ignore[attr-defined]
        self.session.policy = msgspec.structs.replace(
            Policy(), classes={**Policy().classes, FailureClass.EXCEPTION: ladder}
        )
        self.times = times
        self.bodies: list[int] = []

    def run(self) -> None:
        for step in self.runner.loop():
            with step:
                self.bodies.append(step.number)
                self.backward(step)
                if step.number == 2 and self.bodies.count(2) <= self.times:
                    raise ValueError("bad batch")
                self.optimizer.step()
                self.optimizer.zero_grad()

    def told(self, kind: type) -> list[Any]:
        return [message for message in self.agent.sent if isinstance(message, kind)]


def undisturbed() -> torch.Tensor:
    job = Job()
    for step in job.runner.loop():
        with step:
            job.backward(step)
            job.optimizer.step()
            job.optimizer.zero_grad()
    return job.model.weight


def test_with_a_plan_the_step_is_run_again() -> None:
    job = Raising(1, wire.Plan(epoch=0, store=STORE), wire.Plan(epoch=1, store=STORE))  # the first is an old one
    job.run()
    assert job.bodies == [0, 1, 2, 2, 3]
    assert torch.equal(job.model.weight, undisturbed())
    assert job.told(wire.Raised) == [wire.Raised(step=2, epoch=0, reason="ValueError: bad batch")]
    assert job.told(wire.Parked) == [wire.Parked(epoch=0)]
    assert not job.told(wire.Failing)
    assert not job.agent.holding


@pytest.mark.parametrize("answer", [wire.Surrender(), None], ids=["surrender", "silence"])
def test_otherwise_the_exception_goes_on_from_where_it_came(answer: wire.FromAgent | None) -> None:
    job = Raising(1, *([answer] if answer is not None else []))
    with pytest.raises(ValueError, match="bad batch") as caught:
        job.run()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames == ["test_otherwise_the_exception_goes_on_from_where_it_came", "run"], "no frame of leto"
    assert len(job.told(wire.Failing)) == (answer is None)


@pytest.mark.parametrize("ladder", [(Action.PROMOTE, Action.FAIL), (Action.FAIL,)])
def test_nothing_is_held_when_the_policy_never_retries(ladder: tuple[Action, ...]) -> None:
    job = Raising(1, ladder=ladder)
    with pytest.raises(ValueError, match="bad batch"):
        job.run()
    assert job.told(wire.Failing) == [wire.Failing(step=2, reason="ValueError: bad batch")]
    assert not job.told(wire.Raised)


def test_nothing_is_held_after_the_vote() -> None:
    job = Raising(0)
    step = next(job.runner.loop())
    with pytest.raises(ValueError, match="late"), step:  # noqa: PT012
        job.backward(step)
        job.optimizer.step()
        raise ValueError("late")
    assert job.told(wire.Failing)
    assert not job.told(wire.Raised)


@pytest.mark.parametrize(
    ("spoiled", "error", "own"),
    [
        (False, ValueError("mine"), True),
        (True, ValueError("computed from garbage"), False),
        (False, CommunicatorLost("no group can be made now"), False),
    ],
)
def test_whose_an_exception_is_in_an_epoch_that_was_given_up(spoiled: bool, error: Exception, own: bool) -> None:
    job = Raising(0, wire.Plan(epoch=1, store=STORE))
    bodies: list[int] = []
    for step in job.runner.loop():
        with step:
            bodies.append(step.number)
            job.backward(step)
            if bodies == [0, 1, 2]:
                job.session.fabric.poisoned, job.session.fabric.spoiled = True, spoiled
                raise error
            job.session.fabric.spoiled = False
            job.optimizer.step()
            job.optimizer.zero_grad()
    assert bodies == [0, 1, 2, 2, 3]
    assert bool(job.told(wire.Raised)) == own


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_is_not_to_be_repaired_is_told_as_such(error: BaseException) -> None:
    job = Raising(0)
    step = next(job.runner.loop())
    with pytest.raises(type(error)), step:
        raise error
    (told,) = job.told(wire.Quitting)
    assert told.reason.startswith(f"rank 0 left the training in step 0 by {type(error).__name__}: ")
    assert not job.told(wire.Failing)
    assert not job.told(wire.Raised)


def test_a_step_is_stepped_over() -> None:
    """Its batch is used up, its body not run; the others are as if it had had no update."""
    job = Raising(0)
    job.session.skip = 2
    job.run()
    assert job.bodies == [0, 1, 3]
    expected = Job()
    for step in expected.runner.loop():
        with step:
            if step.number != 2:
                expected.backward(step)
                expected.optimizer.step()
                expected.optimizer.zero_grad()
    assert torch.equal(job.model.weight, expected.model.weight)
    assert job.once == [0, 1, 2, 3]
    assert job.told(wire.Skipped) == [wire.Skipped(step=2, reason="it raised again after a recovery")]


def test_a_lost_vote_of_a_step_that_is_stepped_over_is_made_again() -> None:
    job = Raising(0)
    job.session.skip = 2
    job.session.fabric.votes = [True, True, False]
    job.run()
    assert job.bodies == [0, 1, 3]
    assert len(job.told(wire.Skipped)) == 1


# ---- numbers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_finite(bad: float, dtype: torch.dtype) -> None:
    tensors = [torch.full((5, 3), torch.finfo(dtype).max, dtype=dtype), torch.zeros(2, dtype=dtype), torch.zeros(())]
    assert numbers.all_finite(tensors)
    tensors[1][1] = bad
    assert not numbers.all_finite(tensors)
    assert numbers.all_finite([])


class Numbers(Job):
    """A job whose gradients of step 2 are not finite, here or on another rank."""

    def __init__(self, mode: Any, where: str) -> None:
        super().__init__()
        self.where = where
        self.session.policy = msgspec.structs.replace(Policy(), step=StepPolicy(nonfinite=mode))

    def run(self) -> None:
        for step in self.runner.loop():
            with step:
                self.backward(step)
                if step.number == 2:
                    self.spoil()
                self.optimizer.step()
                self.session.fabric.lowest = None
                self.optimizer.zero_grad()

    def spoil(self) -> None:
        if self.where == "here":
            assert self.model.bias.grad is not None
            self.model.bias.grad[1] = math.nan
            return
        fabric: Any = self.session.fabric
        fabric.lowest = numbers.NOT_FINITE - 3
        vote = fabric.vote

        def once(value: int = 0) -> int | None:
            lowest = vote(value)
            fabric.lowest, fabric.vote = None, vote
            return lowest

        fabric.vote = once


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_step_whose_gradients_are_not_finite_anywhere_is_skipped_everywhere(where: str) -> None:
    job = Numbers("skip", where)
    job.run()
    expected = Job()
    for step in expected.runner.loop():
        with step:
            expected.backward(step)
            if step.number != 2:
                expected.optimizer.step()
            expected.optimizer.zero_grad()
    assert torch.equal(job.model.weight, expected.model.weight)
    assert job.once == [0, 1, 2, 3]
    (told,) = [message for message in job.session.link.sent if isinstance(message, wire.Skipped)]
    named = "gradients of rank 0 are not finite: bias"
    assert told == wire.Skipped(step=2, reason=named if where == "here" else "gradients of rank 3 are not finite")


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_or_ends_the_job(where: str) -> None:
    job = Numbers("fail", where)
    with pytest.raises(NotFinite, match=r"^step 2: gradients of rank \d are not finite"):
        job.run()
    (told,) = [message for message in job.session.link.sent if isinstance(message, wire.Quitting)]
    assert "not finite" in told.reason


def test_or_is_nobody_s_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "all_finite", lambda _tensors: pytest.fail("looked at"))
    job = Numbers("allow", "here")
    job.run()
    assert torch.isnan(job.model.bias).any()


def test_a_rank_lost_between_the_two_votes_finds_nothing_to_apply() -> None:
    """The others are past the second vote, so it rolls forward from what it has kept: no gradient."""
    job = Numbers("skip", "here")
    loop = job.runner.loop()
    for _ in range(2):
        step = next(loop)
        with step:
            job.backward(step)
            job.optimizer.step()
            job.optimizer.zero_grad()
    before = job.model.weight.detach().clone()
    step = next(loop)
    job.session.fabric.votes = [True, False]
    with step:
        job.backward(step)
        job.spoil()
        job.optimizer.step()
    job.session.others = [at_words(Position(2, Phase.UPDATE))]
    job.session.rank = 0
    step = next(loop)
    assert step.number == 3
    assert torch.equal(job.model.weight, before)
