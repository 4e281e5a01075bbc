"""A process's membership: the first answer, the environment, and joining epochs that are given up."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leto_elastic import wire
from leto_elastic.errors import EpochAborted, LetoError
from leto_elastic.recovery.config import load_policy
from leto_elastic.testing.faults import Faults
from leto_elastic.worker.link import Delivery, Link
from leto_elastic.worker.session import Session, complete_environment

STORE = wire.StoreAddress(host="127.0.0.1", port=1)
WELCOME = wire.Welcome(
    role="shadow",
    rank=7,
    world_size=12,
    local_rank=3,
    local_world_size=4,
    slot=7,
    epoch=2,
    run_id="r",
    run_dir="",
    store=STORE,
    policy=b"",
)


def test_a_spare_learns_its_rank_with_the_welcome() -> None:
    environment = {"LOCAL_RANK": "3", "RANK": "set by someone", "PATH": "/bin"}
    complete_environment(environment, WELCOME)
    assert environment == {
        "PATH": "/bin",
        "RANK": "set by someone",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "7",
        "ROLE_WORLD_SIZE": "12",
    }


def agent(path: Path, *, answer: bool) -> socket.socket:
    """Takes one message, then answers it or goes away."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            wire.receive_from_worker(connection)
            if answer:
                wire.send(connection, WELCOME)

    threading.Thread(target=serve).start()
    return listener


def test_the_first_answer_may_take_for_ever(tmp_path: Path) -> None:
    with agent(tmp_path / "agent", answer=True):
        link = Link(str(tmp_path / "agent"), "token", None)
    assert link.welcome == WELCOME
    link._sock.close()


def test_an_agent_that_goes_away_without_an_answer(tmp_path: Path) -> None:
    with agent(tmp_path / "agent", answer=False), pytest.raises(LetoError, match="did not answer at"):
        Link(str(tmp_path / "agent"), "token", None)


@pytest.mark.parametrize(("text", "deadline"), [("inf", None), ("2.5", 2.5)])
def test_the_deadline_of_the_first_answer(text: str, deadline: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Asked(Exception):
        pass

    def link(path: str, token: str, limit: float | None) -> None:
        seen.append(limit)
        raise Asked

    monkeypatch.setenv("LETO_START_DEADLINE", text)
    monkeypatch.setattr("leto_elastic.worker.session.Link", link)
    with pytest.raises(Asked):
        Session("path", "token")
    assert seen == [deadline]


class Agent:
    """The link of a trainer whose agent sends these plans, one each time it is waited for."""

    def __init__(self, *plans: wire.FromAgent) -> None:
        self.plans = list(plans)
        self.sent: list[wire.Message] = []

    def send(self, message: wire.Message) -> None:
        self.sent.append(message)

    def wait(self, kinds: Any, deadline: float | None, what: str) -> Delivery:
        return Delivery(self.plans.pop(0), [])


class Fabric:
    """Connects, but for the epochs that are given up meanwhile."""

    def __init__(self, *given_up: int) -> None:
        self.epoch, self.reason, self.given_up = 4, "", given_up

    def connect(self, epoch: int, host: str, port: int, deadline: float) -> None:
        if epoch in self.given_up:
            raise EpochAborted(f"epoch {epoch}")
        self.epoch = epoch

    def exchange(self, words: list[int]) -> list[list[int]]:
        return [words, [5, 6]]


def session(agent: Agent, fabric: Fabric) -> Session:
    made = Session.__new__(Session)
    made.link, made.fabric = agent, fabric  # type: ignore[assignment]
    made.policy, made.generation, made.marks = load_policy(None), 0, {}
    made.welcome = SimpleNamespace(address="")  # type: ignore[assignment]
    made.faults = Faults("/nonexistent", 0, ())
    return made


def plan(epoch: int, generation: int) -> wire.Plan:
    return wire.Plan(epoch=epoch, store=STORE, generation=generation)


def test_parked_before_every_wait_and_the_words_are_those_of_the_end() -> None:
    """The state may be put back while any of the plans is awaited."""
    agent = Agent(plan(4, 0), plan(5, 1), plan(7, 2))
    own = session(agent, Fabric(5))
    rows = own.rejoin(None, lambda: [len(agent.sent), 0], 3)
    assert agent.sent == [wire.Parked(epoch=4), wire.Parked(epoch=4), wire.Parked(epoch=5)]
    assert rows == [[3, 0], [5, 6]]
    assert own.generation == 2


def test_promoted_into_an_epoch_that_is_given_up() -> None:
    agent = Agent(plan(6, 3))
    own = session(agent, Fabric(5))
    promotion = wire.Promote(epoch=5, version=1, store=STORE, generation=2)
    assert own.rejoin(promotion, lambda: [1, 2], 3) == [[1, 2], [5, 6]]
    assert agent.sent == [wire.Parked(epoch=5)]
    assert own.generation == 3


def test_no_further_epoch() -> None:
    agent = Agent(wire.Release())
    assert session(agent, Fabric()).rejoin(None, lambda: [1], 3) is None
    assert (
        session(Agent(), Fabric()).rejoin(
            wire.Promote(epoch=5, version=1, store=wire.StoreAddress(host="", port=0)), lambda: [1], 3
        )
        is None
    )
    assert agent.sent == [wire.Parked(epoch=4)]
