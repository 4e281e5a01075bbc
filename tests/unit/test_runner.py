"""The loop's own rules, with communicators and an agent that always agree (or not, when told)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from leto_elastic import wire
from leto_elastic.errors import LetoError, StateError
from leto_elastic.recovery.config import load_policy
from leto_elastic.state import snapshot
from leto_elastic.state.extras import Extras
from leto_elastic.state.header import Phase, Position, tag_of, version_of
from leto_elastic.state.retained import Retained
from leto_elastic.state.train_state import TrainState
from leto_elastic.testing.faults import Faults
from leto_elastic.worker.protection import Words
from leto_elastic.worker.runner import Runner


class Fabric:
    """One rank that is alone and always agrees, unless `votes` says otherwise."""

    def __init__(self) -> None:
        self.poisoned, self.spoiled, self.tolerant, self.reason, self.epoch = False, False, False, "", 0
        self.votes: list[bool] = []
        self.lowest: int | None = None  # of the other ranks

    def vote(self, value: int = 0) -> int | None:
        passed = self.votes.pop(0) if self.votes else True
        self.poisoned = not passed
        if not passed:
            return None
        return value if self.lowest is None else min(value, self.lowest)

    def stop_recording(self) -> bytes:
        return b""


class Link:
    """Segments, and the messages that were sent."""

    def __init__(self) -> None:
        self.sent: list[wire.Message] = []
        self.on_due: Callable[[wire.Due], None] = lambda _due: None

    def alloc(self, name: str, size: int) -> int:
        fd = os.memfd_create(name)
        os.ftruncate(fd, size)
        return fd

    def send(self, message: wire.Message, fds: Any = None) -> None:
        self.sent.append(message)
        if isinstance(message, wire.Due):
            self.on_due(message)

    def send_blob(self, make: Any, data: bytes, name: str) -> None:
        self.sent.append(make(len(data)))


class Session:
    """What the runner needs of a session."""

    def __init__(self, protect: int, every: int) -> None:
        self.fabric, self.link, self.rank = Fabric(), Link(), 0
        self.welcome = welcome(protect, every)
        self.generation, self.skip = 0, -1
        self.policy = load_policy(None)
        self.faults = Faults("/nonexistent", 0, ())
        self.marks: dict[str, float] = {}
        self.others: list[Words] = []
        self.meanwhile: Callable[[], None] = lambda: None  # what the agent does while a plan is awaited

    def mark(self, name: str) -> None:
        pass

    def watched(self, header: Any) -> None:
        pass

    def rejoin(self, plan: Any, words: Callable[[], Words], step: int) -> list[list[int]]:
        self.meanwhile()
        self.meanwhile = lambda: None
        self.fabric.poisoned = False
        self.fabric.epoch += 1
        return [list(row) for row in (words(), *self.others)]


def welcome(protect: int, every: int) -> wire.Welcome:
    store = wire.StoreAddress(host="", port=0)
    policy = load_policy(None).encode()
    return wire.Welcome(
        role="trainer",
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        slot=0,
        epoch=0,
        run_id="",
        run_dir="",
        store=store,
        policy=policy,
        protect=protect,
        every=every,
    )


def at_words(position: Position, agreed: int = -1, kept: int = -1, newest: int = -1) -> Words:
    return Words(position.pack(), agreed, kept, newest)


class Job:
    """A model, its runner, and how often things ran."""

    def __init__(self, until: int = 4, protect: int = 0, every: int = 1, elementwise: bool | None = None) -> None:
        torch.manual_seed(0)
        self.session = Session(protect, every)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            data=[torch.full((2, 4), float(i + 1)) for i in range(9)],
            elementwise=elementwise,
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
            job.session.others = [at_words(Position(2, Phase.UPDATE if passed_elsewhere else Phase.VOTE))]
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


class Protected(Job):
    """A job whose agent sends at once what is due."""

    def __init__(self, kind: str, until: int = 9) -> None:
        self.drawn: list[tuple[int, float, float]] = []  # step, sample and random number of every pass of the body
        super().__init__(until, protect=1, every=2, elementwise=None if kind == "elementwise" else False)
        self.session.link.on_due = self.send

    @property
    def retained(self) -> Retained:
        return self.runner.retained

    def send(self, due: wire.Due) -> None:
        assert due.buffer == -1
        self.retained.header.sent = tag_of(due.step, due.generation)

    def go(self, fail: Callable[[int, str], None] = lambda _step, _where: None) -> None:
        """The whole loop; `fail` may lose the epoch before and after the optimizer's step."""
        for step in self.runner.loop():
            with step:
                noise = torch.rand(())
                self.drawn.append((step.number, float(step.batch[0, 0]), float(noise)))
                (self.model(step.batch) * noise).square().sum().backward()
                fail(step.number, "vote")
                self.optimizer.step()
                fail(step.number, "update")
                self.optimizer.zero_grad()

    def put_back(self, version: int, slot: int) -> None:
        """As an agent does it, after a loss of memory elsewhere."""
        retained, header = self.retained, self.retained.header
        manifest = retained.manifest
        at = header.position
        kept = retained.arenas[manifest.snapshots[0]]
        if version_of(header.buffers[0]) == version:
            ranges = snapshot.all_ranges(manifest)
        else:
            assert version_of(header.target[0]) == version == at.step
            ranges = snapshot.undo_ranges(manifest, at)
        for offset, place in ranges:
            kept.copy_out(offset, place.size, retained.arenas[place.segment], place.offset)
        extras = Extras(retained.arenas[manifest.extras], manifest.extras_capacity)
        start = snapshot.extras_at(manifest)
        size = int.from_bytes(kept.bytes(start, 8), "little")
        extras.write(slot, bytes(kept.bytes(start + 16, size)))
        header.position = Position(version, Phase.COMPUTE, slot=slot)
        self.session.generation = 7


@pytest.mark.parametrize("kind", ["elementwise", "coupled"])
@pytest.mark.parametrize(
    ("step", "where", "version"),
    [(6, "vote", 5), (6, "update", 5), (5, "update", 5), (7, "vote", 5), (7, "update", 7), (8, "vote", 7)],
)
def test_put_back_to_an_earlier_step_while_a_plan_is_awaited(kind: str, step: int, where: str, version: int) -> None:
    """The same samples, random numbers and bits again from there, whatever had been done since."""
    expected = Protected(kind)
    expected.go()
    assert [number for number, _, _ in expected.drawn] == list(range(9))
    job = Protected(kind)
    failed: list[int] = []

    def fail(number: int, at: str) -> None:
        if (number, at) == (step, where) and not failed:
            failed.append(number)
            job.session.fabric.poisoned = True
            job.session.meanwhile = lambda: job.put_back(version, (job.retained.header.position.slot + 1) % 3)

    job.go(fail)
    assert job.drawn == [*expected.drawn[: step + 1], *expected.drawn[version:]]
    assert torch.equal(job.model.weight, expected.model.weight)
    for name, value in expected.optimizer.state[expected.model.weight].items():
        assert torch.equal(job.optimizer.state[job.model.weight][name], value)
    asked = [m for m in job.session.link.sent if isinstance(m, wire.Due)]
    assert (version, 7) in [(due.step, due.generation) for due in asked], "protected anew at once"
    assert job.retained.header.agreed == tag_of(asked[-1].step, 7)


def test_put_back_before_the_layout_that_holds_is_refused() -> None:
    job = Protected("elementwise")

    def fail(number: int, at: str) -> None:
        if number == 3:
            job.session.fabric.poisoned = True
            job.session.meanwhile = lambda: setattr(job.retained.header, "position", Position(0, Phase.COMPUTE))

    with pytest.raises(StateError, match="put back to step 0, the layout holds from step 1 on"):
        job.go(fail)


def test_what_a_protected_job_says_and_keeps() -> None:
    job = Protected("elementwise", until=6)
    job.go()
    sent = job.session.link.sent
    assert [m.step for m in sent if isinstance(m, wire.Due)] == [1, 3, 5]
    stepped = [(m.step, m.slot) for m in sent if isinstance(m, wire.Stepped)]
    assert [step for step, _ in stepped] == [1, 2, 3, 4, 5, 6]
    assert stepped[-1][1] == job.retained.header.position.slot
    assert job.retained.header.buffers == (tag_of(5, 0), -1)
    assert job.retained.header.target[0] == -1
    plain = Job(6)
    for step in plain.runner.loop():
        with step:
            plain.backward(step)
            plain.optimizer.step()
            plain.optimizer.zero_grad()
    assert not any(isinstance(m, (wire.Due, wire.Stepped)) for m in plain.session.link.sent)
    assert plain.runner.retained.manifest.snapshots == []


def test_a_version_that_not_every_rank_sent_is_tried_again() -> None:
    job = Protected("elementwise", until=6)
    job.session.fabric.lowest = -1
    job.go()
    assert [m.step for m in job.session.link.sent if isinstance(m, wire.Due)] == [1, 2, 3, 4, 5]
    assert job.retained.header.buffers == (-1, -1)


def test_rolled_forward_with_the_snapshot_that_the_others_kept() -> None:
    """The vote's result was lost here; another rank has it, and its snapshot of step 3."""
    expected = Protected("elementwise")
    expected.go()
    job = Protected("elementwise")
    start: list[torch.Tensor] = []

    def fail(number: int, at: str) -> None:
        if number == 3 and at == "vote" and not start:
            start.append(job.model.weight.detach().clone())
            job.session.fabric.votes = [False]
            tag = tag_of(3, 0)
            job.session.others = [at_words(Position(4, Phase.COMPUTE), agreed=tag, kept=tag, newest=tag)]
        elif number == 4 and at == "vote":
            header, manifest = job.retained.header, job.retained.manifest
            assert header.buffers[0] == header.agreed == tag_of(3, 0)
            place = manifest.weights[0].place
            held = job.retained.arenas[manifest.snapshots[0]].bytes(snapshot.stream_offset(manifest, place), place.size)
            assert bytes(held) == start[0].numpy().tobytes()

    job.go(fail)
    assert torch.equal(job.model.weight, expected.model.weight)
