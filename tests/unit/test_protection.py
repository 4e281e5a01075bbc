"""Ranks that lose votes, die and come back keep a version in common, at every store of every header.

A whole job in miniature: headers, the worker's side of the protection, and agents that send when they like. After each
store the question is asked that an agent would ask if a node were lost now: is there a version that the lost rank's
keepers have, and that all others can be at?
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from leto_elastic import wire
from leto_elastic.recovery.resolution import resolve
from leto_elastic.state import snapshot
from leto_elastic.state.header import HEADER_BYTES, NO_TAG, Header, Phase, Position, generation_of, tag_of, version_of
from leto_elastic.worker.protection import RESET, Protection, Words, last_update, words_of

EVERY, UNTIL = 3, 10**6


class Link:
    def __init__(self) -> None:
        self.sent: list[wire.Message] = []

    def send(self, message: wire.Message, fds: Any = None) -> None:
        self.sent.append(message)


class Watched(Header):
    """Calls `seen` after each store."""

    seen: Callable[[], None] = staticmethod(lambda: None)

    @property
    def position(self) -> Position:
        return Header.position.fget(self)  # type: ignore[attr-defined, no-any-return]

    @position.setter
    def position(self, value: Position) -> None:
        Header.position.fset(self, value)  # type: ignore[attr-defined]
        self.seen()

    @property
    def agreed(self) -> int:
        return Header.agreed.fget(self)  # type: ignore[attr-defined, no-any-return]

    @agreed.setter
    def agreed(self, tag: int) -> None:
        Header.agreed.fset(self, tag)  # type: ignore[attr-defined]
        self.seen()

    @property
    def target(self) -> tuple[int, int]:
        return Header.target.fget(self)  # type: ignore[attr-defined, no-any-return]

    @target.setter
    def target(self, value: tuple[int, int]) -> None:
        Header.target.fset(self, value)  # type: ignore[attr-defined]
        self.seen()

    def set_buffer(self, index: int, tag: int) -> None:
        super().set_buffer(index, tag)
        self.seen()


class Rank:
    def __init__(self, buffers: int) -> None:
        self.buffers = buffers
        self.link = Link()
        self.kept: set[int] = set()  # tags that are whole at the keepers
        self.generation = 0
        self.start(1)

    def start(self, step: int) -> None:
        """A trainer with new segments."""
        fd = os.memfd_create("header")
        os.ftruncate(fd, HEADER_BYTES)
        self.header = Watched(fd)
        os.close(fd)
        self.header.initialise()
        self.header.position = Position(step, Phase.COMPUTE)
        self.protection = Protection(self.header, self.link, self.buffers, EVERY, UNTIL)  # type: ignore[arg-type]

    @property
    def at(self) -> Position:
        return self.header.position

    def move(self, step: int, phase: Phase) -> None:
        self.header.position = Position(step, phase)

    def deliver(self) -> None:
        """The agent has done what it was asked last, if that is still what it was."""
        asked = [m for m in self.link.sent if isinstance(m, wire.Due)]
        if not asked:
            return
        due = asked[-1]
        tag = tag_of(due.step, due.generation)
        if due.buffer < 0:
            whole = self.at.step == due.step and self.at.phase in (Phase.COMPUTE, Phase.VOTE)
        else:
            whole = self.header.buffers[due.buffer] == tag
        if whole and due.generation == self.generation:
            self.kept.add(tag)
            self.header.sent = tag

    def commit(self, *, ask: bool) -> None:
        step = self.at.step
        self.protection.before_commit(step)
        self.move(step + 1, Phase.COMPUTE)
        self.protection.after_commit()
        if ask:
            self.protection.ask()

    def versions(self) -> set[int]:
        """What this rank can be at, without its peers' help."""
        step, phase = self.at.step, self.at.phase
        found = {version_of(tag) for tag in self.header.buffers if tag != NO_TAG}
        if phase is not Phase.UPDATE or version_of(self.header.target[0]) == step:
            found.add(step)
        return found


class Job:
    def __init__(self, seed: int, buffers: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.ranks = [Rank(buffers) for _ in range(3)]
        self.generation = 0
        self.checks = self.kept = self.returned = 0
        self.promised = False  # everyone has agreed on a version of this generation
        for rank in self.ranks:
            rank.header.seen = self.check  # type: ignore[method-assign]

    def check(self) -> None:
        """A node could be lost now."""
        words = [rank.header.agreed for rank in self.ranks]
        if any(tag == NO_TAG for tag in words):
            self.promised = False
        elif all(generation_of(tag) == self.generation for tag in words):
            self.promised = True
        if not self.promised:
            return
        self.checks += 1
        for lost in self.ranks:
            assert self.common(lost), [(r.at, r.header.agreed, r.header.buffers, r.header.target) for r in self.ranks]

    def common(self, lost: Rank) -> set[int]:
        oldest = min(rank.header.agreed for rank in self.ranks)
        found = {version_of(tag) for tag in lost.kept if tag >= oldest and generation_of(tag) == self.generation}
        for rank in self.ranks:
            if rank is not lost:
                found &= rank.versions()
        return found

    def step(self) -> None:
        roll = self.random.random
        for rank in self.ranks:
            if roll() < 0.7:
                rank.deliver()
        step = self.ranks[0].at.step
        assert all(rank.at == Position(step, Phase.COMPUTE) for rank in self.ranks)
        for rank in self.ranks:
            rank.move(step, Phase.VOTE)
            if roll() < 0.3:
                rank.deliver()
        ballots = [rank.protection.ballot(lambda i=i: self.fresh(step, i)) for i, rank in enumerate(self.ranks)]
        for rank in self.ranks:  # too late for this vote
            if roll() < 0.1:
                rank.deliver()
        lost = roll() < 0.3
        order = self.random.sample(self.ranks, 3)
        for rank in order:
            if lost and roll() < 0.4:
                continue  # does not learn the result
            rank.protection.decide(step, min(ballots))
            if lost and roll() < 0.3:
                continue  # dies, or learns of the failure, before it begins
            rank.move(step, Phase.UPDATE)
            if lost and roll() < 0.3:
                continue
            rank.commit(ask=True)
        if lost:
            self.recover(lose_memory=roll() < 0.3 and self.promised)
        for rank in self.ranks:
            self.kept += rank.header.buffers != (NO_TAG, NO_TAG)

    def fresh(self, step: int, rank: int) -> list[int]:
        """Whether this rank has new parameters in this step, however often that is run."""
        return [1] if random.Random(f"{self.seed} {step} {rank}").random() < 0.01 else []

    def recover(self, *, lose_memory: bool) -> None:
        if lose_memory:
            self.put_back()
        rows = [words_of(rank.header) for rank in self.ranks]
        resolution = resolve({i: Position.unpack(row.position) for i, row in enumerate(rows)})
        for i in self.random.sample(range(3), 3):
            rank = self.ranks[i]
            rank.protection.generation = rank.generation = self.generation
            if resolution.action[i] == "forward":
                if rank.at.phase is Phase.VOTE:
                    rank.protection.follow(rows)
                rank.move(rank.at.step, Phase.UPDATE)
                rank.commit(ask=False)
            rank.move(resolution.step, Phase.COMPUTE)
            rank.protection.joined()
            rank.protection.ask(again=True)

    def put_back(self) -> None:
        """The agents' work after a node was lost."""
        self.returned += 1
        lost = self.random.choice(self.ranks)
        version = max(self.common(lost))
        self.generation += 1
        self.promised = False
        for rank in self.ranks:
            if rank is lost:
                rank.start(version)
                rank.header.seen = self.check  # type: ignore[method-assign]
            elif rank.at.phase is Phase.UPDATE or rank.at.step != version:
                rank.move(version, Phase.COMPUTE)


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_version_in_common_at_every_store(buffers: int) -> None:
    checks = kept = returned = 0
    for seed in range(150):
        job = Job(seed, buffers)
        for rank in job.ranks:
            rank.protection.ask()
        for _ in range(40):
            job.step()
        checks, kept, returned = checks + job.checks, kept + job.kept, returned + job.returned
    assert checks > 10_000
    assert kept > 5_000
    assert returned > 100


def due(rank: Rank) -> list[tuple[int, int]]:
    return [(m.step, m.buffer) for m in rank.link.sent if isinstance(m, wire.Due)]


def run(rank: Rank, steps: int, deliver: Callable[[int], bool]) -> None:
    for _ in range(steps):
        step = rank.at.step
        if deliver(step):
            rank.deliver()
        rank.move(step, Phase.VOTE)
        rank.protection.decide(step, rank.protection.ballot(list))
        rank.move(step, Phase.UPDATE)
        rank.commit(ask=True)


def test_one_buffer_is_due_every_third_step_and_again_when_it_failed() -> None:
    rank = Rank(1)
    rank.protection.ask()
    run(rank, 9, lambda step: step != 4)
    assert due(rank) == [(1, -1), (4, -1), (5, -1), (8, -1)]
    assert rank.header.buffers == (tag_of(8, 0), NO_TAG)
    assert rank.header.agreed == tag_of(8, 0)


def test_two_buffers_take_turns_while_the_agent_takes_its_time() -> None:
    rank = Rank(2)
    rank.protection.ask()
    run(rank, 12, lambda step: step in (3, 9))
    assert due(rank) == [(1, 0), (4, 1), (9, 0)]
    assert rank.header.agreed == tag_of(4, 0)
    assert rank.header.buffers == (tag_of(9, 0), tag_of(4, 0))


def test_a_new_generation_is_protected_at_once() -> None:
    for buffers, expected in ((1, (6, -1)), (2, (6, 0))):
        rank = Rank(buffers)
        rank.protection.ask()
        run(rank, 5, lambda _: True)
        rank.link.sent.clear()
        rank.protection.generation = rank.generation = 9
        rank.protection.joined()
        rank.protection.ask(again=True)
        run(rank, 1, lambda _: True)
        assert due(rank)[0] == expected
        assert {m.generation for m in rank.link.sent if isinstance(m, wire.Due)} == {9}


def test_a_tag_of_an_old_generation_is_no_vote() -> None:
    rank = Rank(1)
    rank.header.sent = tag_of(7, 1)
    assert rank.protection.ballot(list) == NO_TAG
    rank.protection.generation = 1
    assert rank.protection.ballot(list) == tag_of(7, 1)
    assert rank.protection.ballot(lambda: [0]) == RESET


def test_without_buffers_nothing_is_said_or_done() -> None:
    rank = Rank(0)
    run(rank, 3, lambda _: True)
    rank.protection.ask(again=True)
    rank.protection.follow([])
    assert rank.link.sent == []
    assert rank.protection.ballot(lambda: [1]) == 0
    assert rank.header.agreed == NO_TAG


def test_words() -> None:
    rank = Rank(2)
    header = rank.header
    header.position = Position(7, Phase.UPDATE)
    snapshot.begin(header, tag_of(7, 2), 1)
    assert words_of(header) == Words(header.position.pack(), NO_TAG, tag_of(7, 2), tag_of(7, 2))
    header.set_buffer(0, tag_of(6, 1))
    snapshot.clear(header)
    assert words_of(header)[1:] == (NO_TAG, NO_TAG, tag_of(6, 1))
    header.position = Position(7, Phase.COMPUTE)
    assert last_update(header.position) == 6
    assert words_of(header)[1:] == (NO_TAG, tag_of(6, 1), tag_of(6, 1))
