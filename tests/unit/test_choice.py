"""Choices: who has which version, from where, and what is said when nobody has one."""

from __future__ import annotations

import msgspec
import pytest

from leto_elastic.errors import StateError
from leto_elastic.protect.placement import Placement, Seat, place, place_local
from leto_elastic.recovery.choice import (
    Choice,
    NodeStanding,
    Part,
    Piece,
    Rebuild,
    SlotStanding,
    available,
    choose,
)
from leto_elastic.state.header import NO_TAG, Phase, Position, tag_of

Where = tuple[str, int] | tuple[str, int, int]

SEATS = [Seat(p, str(p), (p,)) for p in range(4)]
RS31, RS22 = place(SEATS, 3, 1), place(SEATS, 2, 2)
A, B = tag_of(5, 0), tag_of(5, 2)


def at(where: Where) -> Position:
    return Position(where[1], Phase[where[0]], chunk=where[2] if len(where) == 3 else 0)


def slot(
    rank: int,
    where: Where | None,
    buffer: int = NO_TAG,
    *,
    other: int = NO_TAG,
    target: int = NO_TAG,
    replicas: tuple[int, ...] = (),
) -> SlotStanding:
    """`where` None: lost."""
    if where is None:
        return SlotStanding(rank, True)
    return SlotStanding(rank, False, at(where).pack(), (buffer, other), target, list(replicas), 96)


def nodes(
    *slots: SlotStanding, tags: tuple[int, ...] = (A,), placement: Placement = RS31, extras: tuple[int, ...] = (5,)
) -> list[NodeStanding]:
    """One rank a node; all pieces of these tags are whole at living nodes, and so are sums and extras (versions)."""
    ranks = [s.rank for s in slots]
    return [
        NodeStanding(
            s.rank,
            [s],
            [] if s.lost else [(tag, stripe, index) for tag in tags for stripe, index in placement.held_by(s.rank)],
            [] if s.lost else [(rank, version) for rank in ranks for version in extras],
            sums=[] if s.lost else [(rank, tag) for rank in ranks for tag in tags],
        )
        for s in slots
    ]


@pytest.mark.parametrize(
    ("where", "buffers", "target", "passed", "expected"),
    [
        (("SECTION", 7, 1), (NO_TAG, NO_TAG), NO_TAG, True, {7}),
        (("COMPUTE", 7), (A, NO_TAG), NO_TAG, True, {7, 5}),
        (("DONE", 7), (A, tag_of(6, 0)), NO_TAG, False, {7, 6, 5}),
        (("VOTE", 7), (A, NO_TAG), NO_TAG, False, {7, 5}),
        (("VOTE", 7), (A, NO_TAG), NO_TAG, True, {8, 7, 5}),
        (("UPDATE", 7, 1), (A, NO_TAG), NO_TAG, True, {8, 5}),
        (("UPDATE", 7, 1), (NO_TAG, NO_TAG), tag_of(7, 0), True, {8, 7}),
        (("UPDATE", 7, 1), (NO_TAG, NO_TAG), A, True, {8}),
        (("UPDATE", 7, 1), (NO_TAG, NO_TAG), -2, True, {8}),
        (("SETUP", 0), (NO_TAG, NO_TAG), NO_TAG, True, set()),
        (("SETUP", 0), (A, NO_TAG), NO_TAG, True, {5}),
    ],
)
def test_versions_that_a_slot_has(
    where: Where, buffers: tuple[int, int], target: int, passed: bool, expected: set[int]
) -> None:
    assert available(at(where), buffers, target, passed) == expected


def test_nothing_is_lost() -> None:
    choice = choose(nodes(*(slot(rank, ("COMPUTE", 7)) for rank in range(4))), RS31)
    assert choice == Choice(None, {}, {}, "no memory is lost")


def test_everyone_stands_at_the_protected_version_so_nobody_goes_back() -> None:
    choice = choose(nodes(slot(0, None), *(slot(rank, ("COMPUTE", 5)) for rank in (1, 2, 3))), RS31)
    assert (choice.version, choice.put_back, choice.tag) == (5, {}, A)
    assert set(choice.rebuild) == {0}
    plan = choice.rebuild[0]
    assert (plan.extras, plan.replica, plan.tag) == (1, -1, A)
    assert [part.part for part in plan.parts] == [0, 1, 2]
    for part in plan.parts:
        assert len(part.units) + len(part.pieces) == 3
        assert RS31.stripes[part.stripe].units[part.part].rank == 0  # type: ignore[union-attr]
        assert part.part not in part.units


def test_everyone_goes_back_each_from_where_it_has_it() -> None:
    standing = nodes(
        slot(0, None),
        slot(1, ("COMPUTE", 7), A),
        slot(2, ("UPDATE", 6, 1), other=A),
        slot(3, ("VOTE", 7), A),
    )
    choice = choose(standing, RS31)
    assert choice.version == 5
    assert choice.put_back == {1: "buffer 0", 2: "buffer 1", 3: "buffer 0"}
    assert choice.reason == "version 5, 2 steps back; put back: 1, 2, 3; rebuilt: 0"


def test_the_pre_images_of_a_running_update_are_enough() -> None:
    standing = nodes(
        slot(0, None), slot(1, ("UPDATE", 5, 1), target=A), slot(2, ("VOTE", 5)), slot(3, ("COMPUTE", 6), A)
    )
    choice = choose(standing, RS31)
    assert (choice.version, choice.put_back) == (5, {1: "undo", 3: "buffer 0"})


def test_a_rank_that_has_yet_to_come_to_the_version_by_itself_is_no_source() -> None:
    replicas = (0, 1, 2, 3)
    slots = (
        slot(0, None),
        slot(1, ("UPDATE", 6, 1), A, replicas=replicas),
        slot(2, ("VOTE", 6), A, replicas=replicas),
        slot(3, ("VOTE", 6), A, replicas=replicas),
    )
    assert choose(nodes(*slots, extras=(5, 7)), RS31).version == 5
    ahead = (*slots[:3], slot(3, ("COMPUTE", 7), A, replicas=replicas))
    choice = choose(nodes(*ahead, extras=(5, 7)), RS31)
    assert (choice.version, choice.put_back) == (7, {}), "1 and 2 roll forward"
    assert choice.rebuild == {0: Rebuild(1, replica=3)}
    assert choice.tag == NO_TAG
    assert choose(nodes(*ahead), RS31).version == 5, "nobody keeps its X(7)"


def test_a_buffer_ahead_of_a_vote_that_did_not_pass_is_put_back_from() -> None:
    standing = nodes(slot(0, None), *(slot(rank, ("VOTE", 4), A) for rank in (1, 2, 3)))
    choice = choose(standing, RS31)
    assert (choice.version, choice.put_back) == (5, dict.fromkeys((1, 2, 3), "buffer 0"))


def test_parity_is_taken_from_one_tag_the_newest_that_is_whole() -> None:
    standing = nodes(slot(0, None), *(slot(rank, ("COMPUTE", 5)) for rank in (1, 2, 3)), tags=(A, B))
    assert choose(standing, RS31).rebuild[0].tag == B
    stripe = RS31.stripe_of(0, 1)
    holed = [msgspec.structs.replace(n, pieces=[p for p in n.pieces if p[:2] != (B, stripe.index)]) for n in standing]
    assert choose(holed, RS31).rebuild[0].tag == A
    unsummed = [msgspec.structs.replace(n, sums=[s for s in n.sums or [] if s != (0, B)]) for n in standing]
    choice = choose(unsummed, RS31)
    assert (choice.rebuild[0].tag, choice.tag) == (A, A)
    untold = [msgspec.structs.replace(n, sums=None) for n in standing]
    assert (choose(untold, RS31).rebuild[0].tag, choose(untold, RS31).tag) == (B, NO_TAG)


def test_what_not_every_rank_had_sent_is_chosen_but_not_protected() -> None:
    standing = nodes(slot(0, None), *(slot(rank, ("COMPUTE", 5)) for rank in (1, 2, 3)))
    without = [msgspec.structs.replace(n, sums=[s for s in n.sums or [] if s != (2, A)]) for n in standing]
    choice = choose(without, RS31)
    assert (choice.version, choice.tag) == (5, NO_TAG)


def test_two_lost_nodes_of_four() -> None:
    slots = (slot(0, None), slot(1, ("COMPUTE", 6), A), slot(2, None), slot(3, ("COMPUTE", 6), A))
    choice = choose(nodes(*slots, placement=RS22), RS22)
    assert (choice.version, set(choice.rebuild)) == (5, {0, 2})
    with pytest.raises(StateError, match="rank 0: part 0 has 2 of the 3 pieces it needs") as error:
        choose(nodes(*slots), RS31)
    assert "rank 2: part" in str(error.value)
    assert "version 5" in str(error.value)


def test_a_living_rank_without_the_version_is_rebuilt_when_nothing_else_is_left() -> None:
    """Rank 1 was itself restored, at 6, and nothing was protected since."""
    slots = (slot(0, None), slot(1, ("COMPUTE", 7)), slot(2, ("COMPUTE", 7), A), slot(3, ("COMPUTE", 7), A))
    choice = choose(nodes(*slots, placement=RS22), RS22)
    assert (choice.version, set(choice.rebuild), set(choice.put_back)) == (5, {0, 1}, {2, 3})
    newer = tag_of(6, 0)
    ahead = [slot(rank, ("COMPUTE", 7), A, other=newer) for rank in (2, 3)]
    apart = (slot(0, None), slot(1, ("COMPUTE", 7), A), *ahead)
    choice = choose(nodes(*apart, placement=RS22, tags=(A, newer), extras=(5, 6)), RS22)
    assert (choice.version, set(choice.rebuild)) == (5, {0}), "rather a step back than memory given up"


def test_what_an_interrupted_recovery_left_is_gone_on_with() -> None:
    standing = nodes(
        slot(0, ("COMPUTE", 5)), slot(1, ("COMPUTE", 5), A), slot(2, ("COMPUTE", 7), A), slot(3, ("VOTE", 6), A)
    )
    choice = choose(standing, RS31)
    assert (choice.version, choice.put_back, choice.rebuild) == (5, {2: "buffer 0", 3: "buffer 0"}, {})
    torn = nodes(slot(0, ("SETUP", 5), A), *(slot(rank, ("COMPUTE", 7), A) for rank in (1, 2, 3)))
    assert choose(torn, RS31).put_back == dict.fromkeys(range(4), "buffer 0")


def test_the_local_tier_restores_one_slot_of_a_node() -> None:
    seat = Seat(0, "0", (0, 1, 2))
    slots = [slot(0, ("COMPUTE", 5)), slot(1, None), slot(2, ("COMPUTE", 6), A)]
    kept = [(rank, A) for rank in range(3)]
    node = NodeStanding(0, slots, extras=[(1, 5)], local=[A], sums=kept)
    choice = choose([node], None, {0: place_local(seat)})
    assert choice.rebuild == {1: Rebuild(0, tag=A, parts=[Part(0, -1, [0, 2], [Piece(0, 0)])])}
    assert (choice.put_back, choice.tag) == ({2: "buffer 0"}, A)
    two = msgspec.structs.replace(node, slots=[slot(0, None), *slots[1:]], extras=[(0, 5), (1, 5)])
    with pytest.raises(StateError, match="its node's parity or another rank of its node is missing"):
        choose([two], None, {0: place_local(seat)})


def test_nobody_has_anything() -> None:
    with pytest.raises(StateError, match="no rank has any version"):
        choose(nodes(*(slot(rank, None) for rank in range(4))), RS31)
    with pytest.raises(StateError, match="rank 0: no node keeps its extras"):
        choose(nodes(slot(0, None), *(slot(rank, ("COMPUTE", 5)) for rank in (1, 2, 3)), extras=()), RS31)


def test_standings_and_choices_travel_as_json() -> None:
    standing = nodes(slot(0, None), *(slot(rank, ("COMPUTE", 6), A) for rank in (1, 2, 3)))
    again = msgspec.json.decode(msgspec.json.encode(standing), type=list[NodeStanding])
    choice = choose(standing, RS31)
    assert choose(reversed(again), RS31) == choice
    assert msgspec.json.decode(msgspec.json.encode(choice), type=Choice) == choice
