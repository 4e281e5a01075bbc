"""Who takes part and where, and the code that so many nodes carry."""

from __future__ import annotations

import pytest

from leto_elastic.coordinator.schema import NodeRecord, Seat
from leto_elastic.errors import ConfigError
from leto_elastic.launch.world import World, code_of, position_among
from leto_elastic.recovery.policy import GlobalProtection, Policy, Protection


def seats(*slots: int, places: str = "abcdefghijklmnopqrstuvwxyz") -> list[Seat]:
    return [
        Seat(node=f"node-{position}", slots=count, place=place)
        for position, (count, place) in enumerate(zip(slots, places, strict=False))
    ]


def policy(*, data: int = 0, parity: int = 1) -> Policy:
    return Policy(protect=Protection(global_=GlobalProtection(data=data, parity=parity)))


def test_ranks_follow_the_positions_also_where_nodes_differ() -> None:
    world = World(tuple(seats(2, 3, 1)), 1)
    assert [world.ranks(position) for position in range(3)] == [range(2), range(2, 5), range(5, 6)]
    assert world.size == 6
    assert world.own == range(2, 5)


def test_a_spare_has_no_ranks() -> None:
    world = World(tuple(seats(2, 2)), None)
    assert list(world.own) == []
    assert world.size == 4


def test_one_node() -> None:
    world = World.alone(3)
    assert (world.size, world.position, world.generation) == (3, 0, 0)
    assert world.own == range(3)


def test_the_position_of_a_node() -> None:
    assert [position_among(seats(1, 1), node) for node in ("node-0", "node-1", "node-2")] == [0, 1, None]


@pytest.mark.parametrize(
    ("nodes", "data", "parity", "code"),
    [
        (2, 0, 1, (1, 1)),  # they mirror each other
        (3, 0, 1, (2, 1)),
        (4, 0, 1, (3, 1)),
        (4, 0, 2, (2, 2)),
        (4, 2, 1, (2, 1)),  # as asked, though more would fit
        (9, 0, 1, (8, 1)),
        (20, 0, 2, (8, 2)),  # no wider than that
        (20, 12, 2, (12, 2)),  # unless asked
        (2, 4, 2, (1, 1)),  # the most that two carry
        (4, 0, 0, None),
        (4, 3, 0, None),
        (1, 0, 1, None),
        (1, 4, 2, None),
    ],
)
def test_the_code_that_so_many_nodes_carry(nodes: int, data: int, parity: int, code: tuple[int, int] | None) -> None:
    assert code_of(policy(data=data, parity=parity), seats(*[2] * nodes)) == code


def test_the_default_policy_protects_against_one_lost_node() -> None:
    assert code_of(Policy(), seats(2, 2)) == (1, 1)
    assert code_of(Policy(), seats(2, 2, 2, 2)) == (3, 1)


@pytest.mark.parametrize(
    ("nodes", "data", "parity", "told"),
    [
        (3, 4, 2, r"RS\(4, 2\) needs 6 failure domains, .* there are 3; RS\(1, 2\) would fit"),
        (4, 0, 4, r"RS\(1, 4\) needs 5 failure domains, .* there are 4; RS\(1, 3\) would fit"),
        (2, 0, 2, r"RS\(1, 2\) needs 3 failure domains, .* there are 2; RS\(1, 1\) would fit"),
    ],
)
def test_a_code_for_which_there_are_too_few_nodes(nodes: int, data: int, parity: int, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^protect\.global: {told}"):
        code_of(policy(data=data, parity=parity), seats(*[2] * nodes))


def test_nodes_of_one_rack_count_as_one() -> None:
    assert code_of(Policy(), seats(2, 2, 2, 2, places="aabb")) == (1, 1)
    assert code_of(Policy(), seats(2, 2, 2, 2, places="aabc")) == (2, 1)
    assert code_of(Policy(), seats(2, 2, 2, 2, places="aaaa")) is None
    with pytest.raises(ConfigError, match="there are 3"):
        code_of(policy(data=3), seats(2, 2, 2, 2, places="aabc"))


def test_a_spare_of_another_rack_leaves_the_code_as_it_was() -> None:
    """Stripes are laid out by `place`, the rack of the first node that had the place."""
    before = [Seat.of(f"{i}", NodeRecord(host="h", pid=1, slots=2, domain=rack)) for i, rack in enumerate("abcd")]
    spare = Seat.of("spare", NodeRecord(host="h", pid=2, slots=2, domain="a"), place=before[3].place)
    assert spare.domain == "a"
    assert code_of(Policy(), [*before[:3], spare]) == code_of(Policy(), before) == (3, 1)


def test_a_node_without_a_rack_is_one_of_its_own() -> None:
    nodes = [Seat.of(name, NodeRecord(host="h", pid=1, slots=2)) for name in "abc"]
    assert [seat.place for seat in nodes] == ["a", "b", "c"]
    assert code_of(Policy(), nodes) == (2, 1)
