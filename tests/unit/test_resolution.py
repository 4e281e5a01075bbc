"""Resolution: no step lost, none applied twice, whatever the instant of the failure."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_elastic.errors import StateError
from leto_elastic.recovery.resolution import Resolution, describe, resolve
from leto_elastic.state.header import Phase, Position
from tests.scenarios.world import World


def stand(*positions: tuple[str, int] | tuple[str, int, int]) -> dict[int, Position]:
    """`stand(("VOTE", 7), ("UPDATE", 7, 2))`: rank 0 and rank 1."""
    return {rank: Position(p[1], Phase[p[0]], chunk=p[2] if len(p) == 3 else 0) for rank, p in enumerate(positions)}


@pytest.mark.parametrize(
    ("positions", "step", "actions", "section"),
    [
        # nobody has begun to apply: again
        (stand(("COMPUTE", 7), ("COMPUTE", 7)), 7, "rr", None),
        (stand(("COMPUTE", 7), ("VOTE", 7)), 7, "rr", None),
        (stand(("VOTE", 7), ("VOTE", 7)), 7, "rr", None),
        # one has begun: everyone completes it
        (stand(("UPDATE", 7), ("VOTE", 7)), 8, "ff", 0),
        (stand(("UPDATE", 7, 3), ("UPDATE", 7, 1)), 8, "ff", 0),
        # one has committed: so do the others
        (stand(("COMPUTE", 8), ("VOTE", 7)), 8, "rf", 0),
        (stand(("COMPUTE", 8), ("UPDATE", 7, 2)), 8, "rf", 0),
        (stand(("VOTE", 8), ("UPDATE", 7, 2)), 8, "rf", 0),
        (stand(("DONE", 8), ("UPDATE", 7, 2)), 8, "rf", 0),
        (stand(("DONE", 8), ("DONE", 8)), 8, "rr", None),
        # sections
        (stand(("SECTION", 8, 2), ("SECTION", 8, 1)), 8, "rr", 1),
        (stand(("SECTION", 8, 2), ("COMPUTE", 8)), 8, "rr", 2),
        (stand(("SECTION", 8, 2), ("DONE", 8)), 8, "rr", 2),
        (stand(("SECTION", 8, 2), ("UPDATE", 7)), 8, "rf", 0),
    ],
)
def test_resolution(positions: dict[int, Position], step: int, actions: str, section: int | None) -> None:
    long = {"r": "rerun", "f": "forward"}
    assert resolve(positions) == Resolution(step, {i: long[a] for i, a in enumerate(actions)}, section)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("positions", "who"),
    [
        (stand(("UPDATE", 7), ("COMPUTE", 7)), "rank 1 stands at COMPUTE(7)"),  # it never voted
        (stand(("COMPUTE", 7), ("COMPUTE", 8)), "rank 0 stands at COMPUTE(7)"),
        (stand(("COMPUTE", 9), ("VOTE", 7)), "rank 1 stands at VOTE(7)"),
        (stand(("UPDATE", 8), ("UPDATE", 7)), "rank 1 stands at UPDATE(7, chunk 0)"),
        (stand(("SECTION", 7, 1), ("COMPUTE", 8)), "rank 0 stands at SECTION(7, section 1)"),
        (stand(("DONE", 7), ("COMPUTE", 8)), "rank 0 stands at DONE(7)"),
        (stand(("SETUP", 0), ("COMPUTE", 0)), "rank 0 stands at SETUP(0)"),
    ],
)
def test_an_impossible_state_is_never_resolved(positions: dict[int, Position], who: str) -> None:
    with pytest.raises(StateError, match=re.escape(who)) as error:
        resolve(positions)
    for rank, position in positions.items():
        assert f"{rank}: {describe(position)}" in str(error.value)


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(StateError, match="no position"):
        resolve({})


def test_description_of_a_torn_chunk() -> None:
    assert describe(Position(7, Phase.UPDATE, torn=True, chunk=3)) == "UPDATE(7, chunk 3, torn)"


# ---- any interleaving, any deaths

RANKS, UNTIL, CHUNKS = 3, 4, 2

MOVE = st.tuples(st.just("move"), st.integers(0, RANKS - 1), st.integers(1, 12))
KILL = st.tuples(st.just("kill"), st.integers(0, RANKS - 1), st.just(1))
RECOVER = st.tuples(st.just("recover"), st.just(0), st.just(1))
SCHEDULES = st.lists(st.one_of(MOVE, MOVE, MOVE, MOVE, KILL, RECOVER), max_size=60)


def due(step: int) -> int:
    return 2 if step in (2, UNTIL) else 0


def check(world: World, resolution: Resolution) -> None:
    """A resolution against what the ledger knows."""
    begun = {step for steps in world.applied.values() for step in steps}
    begun |= {at.step for at in world.at.values() if at.phase is Phase.UPDATE}
    assert resolution.step == max(begun, default=-1) + 1, "T is the step after the last one that anybody began"
    for rank, action in resolution.action.items():
        if action == "forward":
            assert resolution.step - 1 in world.passed, "forward without a vote that passed"
            assert resolution.step - 1 not in world.applied[rank], "applied twice"
        else:
            assert world.at[rank].phase is not Phase.UPDATE, "a half applied step run again"
            assert world.applied[rank] == list(range(resolution.step)), "a step lost"
    for section in range(due(resolution.step)):
        left_by_all = all((resolution.step, section) in left for left in world.left_sections.values())
        again = resolution.section is not None and section >= resolution.section
        assert left_by_all or again, "a section that not everyone has left is not entered again"


@settings(max_examples=400, deadline=None)
@given(SCHEDULES)
def test_every_step_is_applied_once_by_every_rank_whatever_fails(schedule: list[tuple[str, int, int]]) -> None:
    world = World(RANKS, UNTIL, CHUNKS, due)
    for what, rank, times in schedule:
        match what:
            case "move":
                for _ in range(times):
                    world.move(rank)
            case "kill":
                world.kill(rank)
            case _:
                before = dict(world.at)
                resolution = world.recover()
                assert resolution == resolve(before) == resolve(dict(reversed(before.items())))
                check(world, resolution)
    check(world, world.recover())
    world.finish()
    assert all(steps == list(range(UNTIL)) for steps in world.applied.values())
    sections = {(step, section) for step in range(UNTIL + 1) for section in range(due(step))}
    assert all(left == sections for left in world.left_sections.values())


def reachable() -> list[World]:
    """Every state of a small world that failure-free moves lead to (found breadth first)."""
    seen: dict[tuple[object, ...], list[int]] = {}
    todo: list[list[int]] = [[]]
    while todo:
        path = todo.pop()
        world = replay(path)
        key = tuple(world.at.values())
        if key in seen:
            continue
        seen[key] = path
        todo.extend([*path, rank] for rank in world.at if replay(path).move(rank))
    return [replay(path) for path in seen.values()]


def replay(path: list[int]) -> World:
    world = World(2, 2, 1, lambda step: 1 if step else 0)
    for rank in path:
        world.move(rank)
    return world


def test_every_reachable_state_of_a_small_world_resolves() -> None:
    worlds = reachable()
    assert len(worlds) > 50
    for world in worlds:
        resolution = world.recover()
        world.finish()
        assert all(steps == [0, 1] for steps in world.applied.values()), resolution
