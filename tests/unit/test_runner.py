"""The loop's own rules, with communicators and an agent that always agree (or not, when told)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from leto_elastic import wire
from leto_elastic.errors import LetoError, StateError
from leto_elastic.recovery.config import load_policy
from leto_elastic.state.header import Phase, Position
from leto_elastic.state.train_state import TrainState
from leto_elastic.testing.faults import Faults
from leto_elastic.worker.runner import Runner


class Fabric:
    """One rank that is alone and always agrees, unless `votes` says otherwise."""

    def __init__(self) -> None:
        self.poisoned, self.tolerant, self.reason, self.epoch = False, False, "", 0
        self.votes: list[bool] = []

    def vote(self) -> bool:
        passed = self.votes.pop(0) if self.votes else True
        self.poisoned = not passed
        return passed

    def stop_recording(self) -> bytes:
        return b""


class Link:
    """Segments, and the messages that were sent."""

    def __init__(self) -> None:
        self.sent: list[wire.Message] = []

    def alloc(self, name: str, size: int) -> int:
        fd = os.memfd_create(name)
        os.ftruncate(fd, size)
        return fd

    def send(self, message: wire.Message, fds: Any = None) -> None:
        self.sent.append(message)

    def send_blob(self, make: Any, data: bytes, name: str) -> None:
        self.sent.append(make(len(data)))


class Session:
    """What the runner needs of a session."""

    def __init__(self) -> None:
        self.fabric, self.link, self.rank = Fabric(), Link(), 0
        self.policy = load_policy(None)
        self.faults = Faults("/nonexistent", 0, ())
        self.marks: dict[str, float] = {}
        self.others: list[Position] = []

    def mark(self, name: str) -> None:
        pass

    def rejoin(self, plan: Any, word: int, step: int) -> list[int]:
        self.fabric.poisoned = False
        self.fabric.epoch += 1
        return [word, *(position.pack() for position in self.others)]


class Job:
    """A model, its runner, and how often things ran."""

    def __init__(self, until: int = 4) -> None:
        torch.manual_seed(0)
        self.session = Session()
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, data=[torch.full((2, 4), float(i + 1)) for i in range(9)]
        )
        self.once: list[int] = []
        self.state.each_step(lambda: self.once.append(self.runner.step))
        self.runner = Runner(self.session, self.state, until)  # type: ignore[arg-type]
        self.runner.start()

    def backward(self, step: Any) -> None:
        self.model(step.batch).square().sum().backward()


def test_a_step_without_optimizer_step_changes_nothing_and_is_committed() -> None:
    job = Job()
    for step in job.runner.loop():
        with step:
            job.backward(step)
            before = job.model.weight.detach().clone()
            if step.number != 2:
                job.optimizer.step()
            job.optimizer.zero_grad()
        assert torch.equal(job.model.weight, before) == (step.number == 2)
    assert job.once == [0, 1, 2, 3]
    assert isinstance(job.session.link.sent[-1], wire.Finished)


def test_gradients_left_behind_are_an_error_and_are_not_applied() -> None:
    job = Job()
    step = next(job.runner.loop())
    before = job.model.weight.detach().clone()
    with pytest.raises(StateError, match="weight still has a gradient at the end of step 0"), step:
        job.backward(step)
    assert torch.equal(job.model.weight, before)
    assert any(isinstance(message, wire.Failing) for message in job.session.link.sent)


def test_misuse_is_told() -> None:
    job = Job()
    loop = job.runner.loop()
    step = next(loop)
    twice = r"optimizer.step\(\) was called twice in step 0"
    with pytest.raises(StateError, match=twice), step:  # noqa: PT012
        job.backward(step)
        job.optimizer.step()
        job.optimizer.step()
    with pytest.raises(LetoError, match=r"optimizer.step\(\) outside of"):
        job.optimizer.step()
    job = Job()
    loop = job.runner.loop()
    next(loop)
    with pytest.raises(LetoError, match=r"step 0 of leto\.steps was not run"):
        next(loop)


@pytest.mark.parametrize("passed_elsewhere", [False, True])
def test_a_lost_vote_reruns_the_step_or_finishes_it(passed_elsewhere: bool) -> None:
    """The body is left at `optimizer.step()`; whether the step is run again depends on where the others stand."""
    expected = Job()
    for step in expected.runner.loop():
        with step:
            expected.backward(step)
            expected.optimizer.step()
            expected.optimizer.zero_grad()

    job = Job()
    seen: list[tuple[int, float]] = []
    after: list[int] = []
    for step in job.runner.loop():
        if step.number == 2 and not after.count(2) and len(seen) == 2:
            job.session.fabric.votes = [False]
            job.session.others = [Position(2, Phase.UPDATE if passed_elsewhere else Phase.VOTE)]
            job.runner.session.rank = 0
        with step:
            seen.append((step.number, float(step.batch[0, 0])))
            job.backward(step)
            job.optimizer.step()
            job.optimizer.zero_grad()
            after.append(step.number)
    runs = [0, 1, 2, 3] if passed_elsewhere else [0, 1, 2, 2, 3]
    assert [number for number, _ in seen] == runs
    assert all(batch == number + 1 for number, batch in seen), "the same batch again"
    assert after == ([0, 1, 3] if passed_elsewhere else [0, 1, 2, 3])
    assert job.once == [0, 1, 2, 3]
    assert torch.equal(job.model.weight, expected.model.weight)


def test_sections_run_after_their_steps_and_leave_no_trace() -> None:
    job = Job(until=6)
    runs: list[int] = []

    def evaluate() -> None:
        runs.append(job.runner.step)
        job.model.eval()
        torch.rand(3)

    job.state.every(2, evaluate)
    states = []
    for step in job.runner.loop():
        states.append(torch.get_rng_state())
        assert job.model.training
        with step:
            pass
    assert runs == [2, 4, 6]
    assert all(torch.equal(state, states[0]) for state in states)
