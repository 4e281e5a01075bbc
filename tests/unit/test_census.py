"""Who is who, from a job's events and its live processes."""

from __future__ import annotations

import pytest

from leto_elastic.testing.census import Census, census
from leto_elastic.testing.chaos import Fault, Kind
from leto_elastic.testing.watching import Event


def started(pid: int, rank: int, role: str = "trainer") -> Event:
    return {"event": "worker_started", "role": role, "rank": rank, "slot": 0, "pid": pid}


EVENTS: list[Event] = [
    started(10, 0),
    started(11, 1),
    started(20, 0, "shadow"),
    started(21, 1, "shadow"),
    started(30, -1, "shadow"),
]
ZYGOTE = "python -c from leto_elastic.launch.zygote import main"


def made(*more: Event, dead: tuple[int, ...] = ()) -> Census:
    """Node 0 has rank 0, node 1 rank 1, node 2 is a spare; 1, 2, 3 are the agents, 4 and 5 a zygote and its child."""
    homes = {1: 0, 2: 1, 3: 2, 4: 0, 5: 0, 10: 0, 20: 0, 11: 1, 21: 1, 30: 2}
    processes = {pid: (home, ZYGOTE if pid in (4, 5) else "python") for pid, home in homes.items() if pid not in dead}
    return census([*EVENTS, *more], processes, {0: 1, 1: 2, 2: 3}, 2)


def hit(there: Census, kind: Kind, pick: int = 0, count: int = 1) -> list[int]:
    return sorted(there.targets(Fault(0.0, kind, pick, count)))


def test_trainers_shadows_and_those_on_their_way() -> None:
    assert made().trainers == {0: 10, 1: 11}
    assert made().shadows == [(-1, 30), (0, 20), (1, 21)]
    assert made().members() == [0, 1]
    dead = made(dead=(10,))
    assert dead.trainers == {1: 11}
    assert (0, 20) in dead.shadows, "no event tells that it is promoted"


def test_a_promotion_makes_a_trainer() -> None:
    recovery: Event = {"event": "recovery", "pids": {"0": 20}}
    assert made(recovery, dead=(10,)).trainers == {0: 20, 1: 11}
    assert made({"event": "replaced", "rank": 0, "slot": 0, "pid": 20}, dead=(10,)).trainers == {0: 20, 1: 11}


def test_a_spare_that_was_given_a_rank_has_it() -> None:
    ready: Event = {"event": "shadow_ready", "rank": 1, "slot": 0, "pid": 30}
    assert (1, 30) in made(ready, dead=(2, 11, 21)).shadows


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("kill", [10], [11]),
        ("stop", [10], [11]),
        ("several", [10, 11], [10, 11]),
        ("shadow", [30], [20]),
        ("both", [10, 20], [11, 21]),
        ("zygote", [4], [4]),
        ("agent_stop", [1], [2]),
    ],
)
def test_targets(kind: Kind, first: list[int], second: list[int]) -> None:
    assert hit(made(), kind, 0, 2) == first
    assert hit(made(), kind, 1, 2) == second


def test_no_target() -> None:
    alone = made(dead=(10, 20, 21, 30, 4, 5))
    assert [hit(alone, kind) for kind in ("several", "both", "shadow", "zygote")] == [[], [], [], []]
    assert hit(alone, "kill", 7) == [11]
    with pytest.raises(ValueError, match="node"):
        alone.targets(Fault(0.0, "node"))
