"""What an agent says and does about hangs: with headers made up, and nobody to kill."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from leto_elastic.coordinator.roster import Said
from leto_elastic.coordinator.schema import NodeRecord, Seat
from leto_elastic.launch import stacks
from leto_elastic.launch.actions import Action, End, Kill
from leto_elastic.launch.culprit import Standing
from leto_elastic.launch.etcd_decider import EtcdDecider
from leto_elastic.launch.watching import Watching
from leto_elastic.launch.world import PlanView, World
from leto_elastic.recovery.config import load_policy
from leto_elastic.recovery.policy import HangPolicy
from leto_elastic.state.header import Phase, Position, Signs
from leto_elastic.wire import StoreAddress

POLICY = HangPolicy(factor=10, min=2, first=300, pause=600, heartbeat=50)
GROUP, OWN = 1, 9


@dataclass
class Header:
    position: Position = field(default_factory=lambda: Position(0, Phase.COMPUTE))
    calls: int = 0
    beat: float = 1.0
    paused: float = 0.0
    waiting: int = 0
    thread: int = 0
    valid: bool = True

    @property
    def signs(self) -> Signs:
        step = self.position.step
        return Signs(step, bytes([step, self.calls]), self.beat, self.paused)

    @property
    def groups(self) -> dict[int, tuple[int, int]]:
        return {GROUP: (self.calls, 0)}


class Node:
    """Ranks 0 and 1 (or 2 and 3) under watch. The clock is moved by hand."""

    def __init__(self, run_dir: Path, *, several: bool = False, first: int = 0) -> None:
        self.now = 100.0
        self.headers = [Header(), Header()]
        self.slots = [
            SimpleNamespace(
                rank=first + index,
                trainer=SimpleNamespace(key=index + 1, pid=os.getpid(), parked=False),
                held=SimpleNamespace(header=header),
                verdict=None,
                detail="",
                position=lambda: Position(3, Phase.COMPUTE),
            )
            for index, header in enumerate(self.headers)
        ]
        self.job: Any = SimpleNamespace(steady=True, over=False, several=several, epoch=4, slots=self.slots)
        self.said: list[tuple[int, str, bytes]] = []
        self.done: list[Action] = []
        self.events: list[dict[str, object]] = []
        self.errors: list[BaseException] = []
        policy = SimpleNamespace(hang=POLICY, deadlines=SimpleNamespace(abort=0.01))
        settings: Any = SimpleNamespace(run_dir=str(run_dir), policy=policy)
        self.immortal = False
        self.watching = Watching(self, self, settings, lambda: self.now)  # type: ignore[arg-type]

    # the shell, and the decider
    def do(self, actions: list[Action]) -> None:
        self.done += actions
        for action in actions:
            if isinstance(action, Kill) and not self.immortal:
                self.slots[action.key - 1].trainer = None
                self.job.steady = False

    def emit(self, event: str, fields: dict[str, object]) -> None:
        self.events.append({"event": event, **fields})

    def broken(self, error: BaseException) -> None:
        self.errors.append(error)

    def placed(self) -> None: ...

    def say(self, epoch: int, stage: str, payload: bytes) -> None:
        self.said.append((epoch, stage, payload))

    async def look(self, seconds: float = 0.025) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.025
            for header in self.headers:
                header.beat = self.now
            self.watching._look()
        await self.settle()

    async def settle(self) -> None:
        while self.watching._tasks:
            await asyncio.gather(*self.watching._tasks)
        assert self.errors == []

    async def steps(self) -> None:
        for step in range(6):
            for header in self.headers:
                header.position = Position(step, Phase.COMPUTE)
            await self.look(0.1)

    async def hang(self) -> None:
        await self.steps()
        self.headers[0].calls, self.headers[0].waiting = 7, GROUP
        self.headers[1].calls = 6
        await self.look(2.2)


def run(node: Node, story: Coroutine[Any, Any, None]) -> None:
    async def told() -> None:
        try:
            await story
        finally:
            node.watching.close()

    asyncio.run(told())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def one_of_two(tmp_path: Path) -> Node:
    return Node(tmp_path, several=True, first=2)


def test_one_node_ends_the_culprit_once(node: Node) -> None:
    async def story() -> None:
        await node.hang()
        await node.look(5)

    run(node, story())
    assert node.done == [Kill(2)]
    assert node.slots[1].verdict == "hang"
    assert node.slots[1].detail.startswith(
        "hung: did not enter the collective that 1 rank waits in; no progress for 2."
    )
    assert [event["rank"] for event in node.events] == [1]
    assert "no answer from the process" in Path(str(node.events[0]["stacks"])).read_text()
    assert node.said == []


def test_one_that_goes_on_while_its_stacks_are_saved_is_left_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def save(*_: object) -> None:
        node.headers[1].calls += 1

    monkeypatch.setattr(stacks, "save", save)
    run(node, node.hang())
    assert node.done == []
    assert node.slots[1].verdict is None


def test_one_that_dies_meanwhile_is_not_killed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def save(*_: object) -> None:
        node.slots[1].trainer = None
        node.job.steady = False

    monkeypatch.setattr(stacks, "save", save)
    run(node, node.hang())
    assert (node.done, node.events) == ([], [])


def test_one_that_does_not_die_ends_the_job(node: Node) -> None:
    node.immortal = True
    run(node, node.hang())
    kill, end = node.done
    assert kill == Kill(2)
    assert isinstance(end, End)
    assert "not even by SIGKILL" in str(end.reason)


def test_a_recovery_is_not_watched(node: Node) -> None:
    async def story() -> None:
        await node.steps()
        node.job.steady = False
        await node.look(1000)

    run(node, story())
    assert node.done == []


def test_when_all_compute_the_job_ends_and_says_what_to_do(node: Node) -> None:
    async def story() -> None:
        await node.steps()
        await node.look(5)

    run(node, story())
    (end,) = node.done
    assert isinstance(end, End)
    assert "no rank waits in a collective" in str(end.reason)
    assert "leto.pause_watch()" in str(end.reason)
    assert [event["rank"] for event in node.events] == [0, 1]


def others(*, waiting: int = GROUP, calls: int = 7) -> bytes:
    return msgspec.json.encode([Standing(rank, 5, 2, waiting, {GROUP: calls}, {}) for rank in (0, 1)])


def test_a_node_of_several_says_that_it_stalls_and_takes_it_back(one_of_two: Node) -> None:
    node = one_of_two

    async def story() -> None:
        await node.hang()
        ((epoch, stage, payload),) = node.said
        assert (epoch, stage) == (4, "stalled")
        stand = msgspec.json.decode(payload, type=list[Standing])
        assert [(s.rank, s.waiting, s.calls) for s in stand] == [(2, GROUP, {GROUP: 7}), (3, 0, {GROUP: 6})]
        await node.look(3)
        assert len(node.said) == 1
        node.headers[0].calls += 1
        await node.look()
        assert node.said[1:] == [(4, "stalled", b"")]
        node.watching.met(4, {0: others(), 1: payload})
        await node.settle()
        assert node.done == [], "it was overtaken"

    run(node, story())


def test_several_nodes_come_to_one_verdict_when_all_have_said_so(one_of_two: Node) -> None:
    node = one_of_two

    async def story() -> None:
        await node.hang()
        own = node.said[0][2]
        for epoch, said in ((4, {0: b"", 1: own}), (3, {0: others(), 1: own})):
            node.watching.met(epoch, said)
            await node.settle()
        assert node.done == [], "the other node goes on, or it was said of another epoch"
        node.watching.met(4, {0: others(), 1: own})
        await node.settle()
        assert node.done == [Kill(2)]

    run(node, story())


def test_a_culprit_elsewhere_is_the_business_of_its_node(one_of_two: Node) -> None:
    node = one_of_two

    async def story() -> None:
        await node.hang()
        stand = msgspec.json.decode(node.said[0][2], type=list[Standing])
        own = msgspec.json.encode([msgspec.structs.replace(s, waiting=GROUP, calls={GROUP: 7}) for s in stand])
        node.watching.met(4, {0: others(calls=6, waiting=0), 1: own})
        await node.settle()
        assert node.done == []

    run(node, story())


def test_what_is_said_of_stalls_is_told_at_each_change_and_of_other_stages_once() -> None:
    node: Any = NodeRecord(host="a", pid=1, slots=1)
    decider = EtcdDecider(None, "job", node, (2, 2), load_policy(None), 0)
    heard: list[tuple[str, dict[int, bytes]]] = []
    decider._ears = SimpleNamespace(met=lambda epoch, stage, said: heard.append((stage, said)))  # type: ignore[assignment]
    world = World((Seat(node="a", slots=1), Seat(node="b", slots=1)), 0)
    decider._plan = PlanView(4, "start", {}, StoreAddress("", 0), "", world)
    for stage in ("stalled", "ready"):
        decider._hear(Said(3, stage, 0, b"old"))
        for position, payload in ((1, b"one"), (0, b"two"), (1, b""), (1, b"three")):
            decider._hear(Said(4, stage, position, payload))
    stalls = [said for stage, said in heard if stage == "stalled"]
    assert stalls == [{0: b"two", 1: b"one"}, {0: b"two", 1: b""}, {0: b"two", 1: b"three"}]
    assert [said for stage, said in heard if stage == "ready"] == stalls[:1]
