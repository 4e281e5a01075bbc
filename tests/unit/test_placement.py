"""Placement: whichever nodes go together, a stripe loses no more pieces than it has parity."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_elastic.protect.placement import (
    ALIGNMENT,
    Choice,
    Placement,
    Seat,
    Stripe,
    Unit,
    choose_code,
    crowded,
    place,
    place_local,
    unit_bytes,
    unit_range,
)


def seat_nodes(domains: list[str], counts: list[int]) -> list[Seat]:
    """The node at position i is in domains[i] and has counts[i] ranks, numbered on."""
    ends = list(itertools.accumulate(counts))
    return [
        Seat(i, domain, tuple(range(end - count, end)))
        for i, (domain, count, end) in enumerate(zip(domains, counts, ends, strict=True))
    ]


def names(count: int) -> list[str]:
    return [f"node{i}" for i in range(count)]


def racks(*sizes: int) -> list[str]:
    """`racks(2, 1)`: a, a, b."""
    return [chr(ord("a") + i) for i, size in enumerate(sizes) for _ in range(size)]


@st.composite
def jobs(draw: st.DrawFn, most: int = 64, width: int = 12, racked: bool = True) -> tuple[list[Seat], int, int]:
    """Any job that can carry its code: no rack holds more than its share of the nodes."""
    data = draw(st.integers(1, width - 1))
    parity = draw(st.integers(1, width - data))
    nodes = draw(st.integers(data + parity, most))
    counts = draw(st.lists(st.integers(0, 8) if draw(st.booleans()) else st.just(2), min_size=nodes, max_size=nodes))
    if not racked or draw(st.booleans()):
        return seat_nodes(names(nodes), counts), data, parity
    share = nodes // (data + parity)
    sizes: list[int] = []
    while (left := nodes - sum(sizes)) > 0:
        sizes.append(min(left, share if draw(st.booleans()) else draw(st.integers(1, share))))
    domains = draw(st.permutations([f"rack{i}" for i, size in enumerate(sizes) for _ in range(size)]))
    return seat_nodes(domains, counts), data, parity


def pieces(placement: Placement, stripe: Stripe) -> list[int]:
    """The positions of what the stripe consists of; units of zeros are nowhere."""
    return [placement.position_of(unit.rank) for unit in stripe.units if unit is not None] + list(stripe.holders)


@given(jobs())
@settings(deadline=None)
def test_no_domain_holds_two_pieces_of_a_stripe(job: tuple[list[Seat], int, int]) -> None:
    seats, data, parity = job
    placement = place(seats, data, parity)
    domains = {seat.position: seat.domain for seat in seats}
    for stripe in placement.stripes:
        assert (len(stripe.units), len(stripe.holders)) == (data, parity)
        held = [domains[position] for position in pieces(placement, stripe)]
        assert len(set(held)) == len(held)
    assert crowded(placement, domains) == ()


@given(jobs())
@settings(deadline=None)
def test_every_part_is_in_exactly_one_stripe(job: tuple[list[Seat], int, int]) -> None:
    seats, data, parity = job
    placement = place(seats, data, parity)
    found = Counter(unit for stripe in placement.stripes for unit in stripe.units if unit is not None)
    assert found == {Unit(rank, part): 1 for seat in seats for rank in seat.ranks for part in range(data)}
    for unit in found:
        stripe = placement.stripe_of(unit.rank, unit.part)
        assert stripe.units[unit.part] == unit
        assert placement.stripes[stripe.index] is stripe
    assert all(placement.position_of(rank) == seat.position for seat in seats for rank in seat.ranks)


@given(jobs())
@settings(deadline=None)
def test_every_node_keeps_as_many_pieces_of_parity(job: tuple[list[Seat], int, int]) -> None:
    seats, data, parity = job
    placement = place(seats, data, parity)
    columns = max(len(seat.ranks) for seat in seats)
    held = {seat.position: placement.held_by(seat.position) for seat in seats}
    assert {len(kept) for kept in held.values()} == {parity * columns}
    assert len(placement.stripes) == columns * len(seats)
    for position, kept in held.items():
        assert all(placement.stripes[index].holders[piece] == position for index, piece in kept)


@given(jobs())
@settings(deadline=None)
def test_keepers_are_in_other_domains_and_evenly_spread(job: tuple[list[Seat], int, int]) -> None:
    seats, data, parity = job
    placement = place(seats, data, parity)
    domains = {seat.position: seat.domain for seat in seats}
    load: Counter[int] = Counter()
    for seat in seats:
        for rank in seat.ranks:
            keepers = placement.keepers_of(rank)
            assert len(keepers) == parity
            assert len({seat.domain, *(domains[keeper] for keeper in keepers)}) == parity + 1
        load.update(placement.keepers_of(seat.ranks[0]) if seat.ranks else ())
    if all(seat.ranks for seat in seats):
        assert set(load.values()) == {parity}


@given(jobs(most=8, width=8))
@settings(deadline=None)
def test_any_m_domains_may_be_lost(job: tuple[list[Seat], int, int]) -> None:
    seats, data, parity = job
    placement = place(seats, data, parity)
    domains = {seat.position: seat.domain for seat in seats}
    for lost in itertools.combinations(sorted(set(domains.values())), parity):
        for stripe in placement.stripes:
            zeros = stripe.units.count(None)
            left = [position for position in pieces(placement, stripe) if domains[position] not in lost]
            assert zeros + len(left) >= data


@given(jobs(most=12, racked=False), st.data())
@settings(deadline=None)
def test_a_replaced_node_moves_nothing(job: tuple[list[Seat], int, int], data: st.DataObject) -> None:
    seats, k, m = job
    before = place(seats, k, m)
    lost = data.draw(st.integers(0, len(seats) - 1))
    seats[lost] = Seat(lost, "the spare", seats[lost].ranks)
    assert place(data.draw(st.permutations(seats)), k, m).stripes == before.stripes


@given(jobs(most=24))
@settings(deadline=None)
def test_only_the_grouping_counts_not_the_labels(job: tuple[list[Seat], int, int]) -> None:
    seats, data, parity = job
    renamed = [Seat(seat.position, seat.domain[::-1] + "!", seat.ranks) for seat in seats]
    assert place(renamed, data, parity).stripes == place(seats, data, parity).stripes


def test_the_rotation_of_one_column() -> None:
    placement = place(seat_nodes(names(4), [1, 1, 0, 1]), 2, 1)
    zero, one, three = ([Unit(rank, part) for part in range(2)] for rank in range(3))
    assert placement.stripes == (
        Stripe(0, (zero[0], one[1]), (2,)),
        Stripe(1, (one[0], None), (3,)),
        Stripe(2, (None, three[1]), (0,)),
        Stripe(3, (three[0], zero[1]), (1,)),
    )
    assert placement.stripe_of(0, 1).index == 3
    assert placement.held_by(2) == ((0, 0),)
    assert placement.keepers_of(2) == (0,)


def test_racks_whose_nodes_sit_side_by_side_are_taken_apart() -> None:
    placement = place(seat_nodes(racks(2, 2, 2, 1), [1] * 7), 2, 1)
    assert "".join(seat.domain for seat in placement.ring) == "abcdabc"
    assert [seat.position for seat in place(seat_nodes(list("abcabc"), [1] * 6), 2, 1).ring] == list(range(6))


@pytest.mark.parametrize("nodes", range(2, 13))
def test_an_order_is_found_whenever_no_domain_has_more_than_its_share(nodes: int) -> None:
    """For every partition of so many nodes into racks, and every width."""

    def partitions(left: int, largest: int) -> list[tuple[int, ...]]:
        if left == 0:
            return [()]
        return [(q, *rest) for q in range(min(left, largest), 0, -1) for rest in partitions(left - q, q)]

    for width, sizes in itertools.product(range(2, nodes + 1), partitions(nodes, nodes)):
        seats = seat_nodes(racks(*sizes), [1] * nodes)
        if max(sizes) * width > nodes:
            with pytest.raises(ValueError, match=f"'a' holds {max(sizes)} of {nodes} nodes"):
                place(seats, width - 1, 1)
        else:
            ring = [seat.domain for seat in place(seats, width - 1, 1).ring]
            assert all(len(set((ring + ring)[i : i + width])) == width for i in range(nodes))


@pytest.mark.parametrize(
    ("seats", "code", "message"),
    [
        (seat_nodes(names(3), [1] * 3), (4, 2), r"RS\(4, 2\) needs 6 nodes in different failure domains; there are 3"),
        (
            seat_nodes(racks(3, 2, 2, 2), [1] * 9),
            (3, 1),
            r"'a' holds 3 of 9 nodes; RS\(3, 1\) needs 4 .* at most 2 nodes in one; .* at most 3 pieces",
        ),
        (seat_nodes(racks(3, 1, 1), [1] * 5), (2, 1), r"'a' holds 3 of 5 nodes; .* at most 1 nodes .* more domains$"),
        ([], (1, 1), "there are 0"),
        ([Seat(0, "a", (0,)), Seat(2, "b", (1,))], (1, 1), r"positions must be 0\.\.1, not \[0, 2\]"),
        ([Seat(0, "a", (0,)), Seat(1, "b", (0,))], (1, 1), "rank 0 sits at positions 0 and 1"),
        (seat_nodes(names(3), [1] * 3), (0, 1), r"not RS\(0, 1\)"),
        (seat_nodes(names(3), [1] * 3), (2, 0), r"not RS\(2, 0\)"),
    ],
)
def test_refusals_give_the_numbers(seats: list[Seat], code: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(seats, *code)


def test_a_rank_that_is_not_in_the_job_is_refused() -> None:
    placement = place(seat_nodes(names(3), [1] * 3), 2, 1)
    for lookup in (lambda: placement.stripe_of(3, 0), lambda: placement.stripe_of(0, 2), lambda: placement.held_by(3)):
        with pytest.raises(KeyError):
            lookup()


@pytest.mark.parametrize(
    ("data", "parity", "domains", "code", "note"),
    [
        (4, 2, 1, None, "one failure domain cannot carry RS(4, 2)"),
        (1, 1, 1, None, "only the local tier"),
        (4, 2, 2, (1, 1), "mirror each other, one may be lost"),
        (2, 1, 2, (1, 1), "cannot carry RS(2, 1)"),
        (1, 1, 2, (1, 1), ""),
        (4, 2, 6, (4, 2), ""),
        (4, 2, 9, (4, 2), ""),
    ],
)
def test_the_code_that_the_domains_carry(
    data: int, parity: int, domains: int, code: tuple[int, int] | None, note: str
) -> None:
    choice = choose_code(data, parity, domains)
    assert choice.code == code
    assert note in choice.note if note else choice == Choice(code)


@pytest.mark.parametrize(
    ("data", "parity", "domains", "message"),
    [
        (4, 2, 5, r"RS\(4, 2\) needs 6 failure domains, .* there are 5; RS\(3, 2\) would fit"),
        (2, 4, 3, r"RS\(2, 4\) needs 6 .* there are 3; RS\(1, 2\) would fit"),
        (1, 2, 2, r"RS\(1, 2\) needs 3 .* there are 2; RS\(1, 1\) would fit"),
        (0, 2, 2, r"not RS\(0, 2\)"),
        (2, 1, 0, "at least one failure domain, not 0"),
    ],
)
def test_too_few_domains_are_refused(data: int, parity: int, domains: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_code(data, parity, domains)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(2, 32))
def test_what_is_said_to_fit_fits(data: int, parity: int, domains: int) -> None:
    try:
        code = choose_code(data, parity, domains).code
    except ValueError as error:
        fits = str(error).rpartition("RS(")[2].partition(")")[0].split(", ")
        code = int(fits[0]), int(fits[1])
        assert choose_code(*code, domains) == Choice(code)
    assert code is not None
    place(seat_nodes(names(domains), [1] * domains), *code)


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_the_parts_cover_the_state(length: int, data: int) -> None:
    size = unit_bytes(length, data)
    ranges = [unit_range(length, data, part) for part in range(data)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == length
    assert all(0 <= stop - start <= size for start, stop in ranges)
    assert all(start % ALIGNMENT == 0 for start, stop in ranges if start < stop)
    assert size % ALIGNMENT == 0
    assert -(-length // data) <= size < -(-length // data) + ALIGNMENT


def test_the_parts_of_a_short_state() -> None:
    assert [unit_range(100, 4, part) for part in range(4)] == [(0, 64), (64, 100), (100, 100), (100, 100)]
    assert unit_range(100, 1, 0) == (0, 100)
    for part in (-1, 4):
        with pytest.raises(ValueError, match=f"part {part} of a state that is cut into 4"):
            unit_range(100, 4, part)


def test_the_local_stripe_is_kept_at_home() -> None:
    assert place_local(Seat(3, "a", (6, 7))) == Stripe(3, (Unit(6, 0), Unit(7, 0)), (3,))
    assert place_local(Seat(3, "a", (6,))) == Stripe(3, (Unit(6, 0),), (3,))
    with pytest.raises(ValueError, match="position 3 has no rank"):
        place_local(Seat(3, "a", ()))


def test_a_spare_from_another_rack_crowds_the_stripes_that_both_are_in() -> None:
    seats = seat_nodes(list("abcdef"), [1, 1, 1, 1, 1, 0])
    placement = place(seats, 2, 1)
    now = {seat.position: seat.domain for seat in seats}
    assert [stripe.index for stripe in crowded(placement, now | {1: "a"})] == [0, 5]
    assert crowded(placement, now | {3: "a"}) == ()
    # stripe 5 is (None, rank 0) kept at 1: the zeros of position 5 are nowhere, so it may share with 0
    assert crowded(placement, now | {5: "a"}) == ()
    assert [stripe.index for stripe in crowded(placement, now | {5: "d"})] == [3]
