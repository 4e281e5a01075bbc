"""Which node keeps the parity of which data: a pure function of where the ranks sit.

The state of a rank is cut into k data units (parts). The nodes stand in a ring, and with RS(k, m) stripe i of a
local-rank column takes part j of the rank on ring node i + j, for j < k, and keeps its m parity pieces on ring nodes
i + k .. i + k + m - 1. What follows from that:

* Any k + m consecutive nodes of the ring are in different failure domains, so a domain holds at most one piece of a
  stripe, and the loss of any m domains is survived.
* Every part is in exactly one stripe, and every node keeps exactly m parity pieces of each column. A node with fewer
  ranks than others gives None, a unit of zeros, to the columns it lacks; a stripe may be None throughout.
* A replaced node keeps its position, so only what was at the lost node moves. Give `place` the failure domains the job
  started with; `crowded` says what a spare from elsewhere has done to them.

Rejected: nodes that only keep parity, which would idle during compute; and a table in the coordinator, which would
grow with the number of stripes and could disagree with its readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

ALIGNMENT = 64  # bytes; a cache line, so that the code runs over whole vectors


@dataclass(frozen=True, slots=True)
class Seat:
    """A node of the job: its position, its failure domain (a label such as its rack) and its ranks by local rank."""

    position: int
    domain: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the state of a rank; see `unit_range` for its bytes."""

    rank: int
    part: int


@dataclass(frozen=True, slots=True)
class Stripe:
    """What is coded together.

    Args:
        index: unique and stable among the stripes of a placement (those of `place_local` are numbered apart).
        units: the k data units; None is a unit of zeros that nobody holds.
        holders: positions of the nodes that keep parity piece 0, 1, ...
    """

    index: int
    units: tuple[Unit | None, ...]
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """All stripes of a job; `stripes[i].index == i`. Lookups raise KeyError for what is not in the job."""

    data: int
    parity: int
    ring: tuple[Seat, ...]
    stripes: tuple[Stripe, ...]
    _places: Mapping[int, int] = field(repr=False, compare=False)  # rank -> place of its node in the ring
    _stripes: Mapping[Unit, int] = field(repr=False, compare=False)
    _held: Mapping[int, tuple[tuple[int, int], ...]] = field(repr=False, compare=False)

    def stripe_of(self, rank: int, part: int) -> Stripe:
        """The only stripe that protects this part."""
        return self.stripes[self._stripes[Unit(rank, part)]]

    def held_by(self, position: int) -> tuple[tuple[int, int], ...]:
        """The parity pieces that the node keeps: (stripe index, parity index), in order of stripes."""
        return self._held[position]

    def position_of(self, rank: int) -> int:
        """Where the rank sits."""
        return self.ring[self._places[rank]].position

    def keepers_of(self, rank: int) -> tuple[int, ...]:
        """Positions, in m other failure domains, of the nodes that keep copies of the rank's manifest and extras."""
        place = self._places[rank]
        return tuple(self.ring[(place + i) % len(self.ring)].position for i in range(1, self.parity + 1))


@dataclass(frozen=True, slots=True)
class Choice:
    """The (data, parity) of the global tier, None when it is off, and what the user should be told ("" for nothing)."""

    code: tuple[int, int] | None
    note: str = ""


def choose_code(data: int, parity: int, domains: int) -> Choice:
    """The code that this many failure domains can carry: RS(data, parity), or less where there are only one or two.

    Raises:
        ValueError: a number below one, or more pieces than domains; naming the numbers and what would fit.
    """
    _check(data, parity)
    if domains < 1:
        raise ValueError(f"a job has at least one failure domain, not {domains}")
    asked = f"RS({data}, {parity})"
    if domains == 1:
        return Choice(
            None, f"one failure domain cannot carry {asked}: only the local tier protects, no node may be lost"
        )
    if domains == 2 and data >= 2:
        return Choice((1, 1), f"two failure domains cannot carry {asked}: they mirror each other, one may be lost")
    if data + parity > domains:
        fits = (domains - parity, parity) if parity < domains else (1, domains - 1)
        raise ValueError(
            f"{asked} needs {data + parity} failure domains, one for each piece of a stripe, and there are {domains}; "
            f"RS{fits} would fit"
        )
    return Choice((data, parity))


def place(seats: Iterable[Seat], data: int, parity: int) -> Placement:
    """The stripes of RS(data, parity) over these nodes, which stand at the positions 0..N-1, given in any order.

    Raises:
        ValueError: the nodes cannot carry the code (too few, or too many of them in one failure domain), or positions
            or ranks are not unique; naming the numbers.
    """
    _check(data, parity)
    seats = sorted(seats, key=lambda seat: seat.position)
    if [seat.position for seat in seats] != list(range(len(seats))):
        raise ValueError(f"positions must be 0..{len(seats) - 1}, not {[seat.position for seat in seats]}")
    places: dict[int, int] = {}
    ring = _ring(seats, data, parity)
    for i, seat in enumerate(ring):
        for rank in seat.ranks:
            if rank in places:
                raise ValueError(f"rank {rank} sits at positions {ring[places[rank]].position} and {seat.position}")
            places[rank] = i
    stripes: list[Stripe] = []
    for column in range(max(len(seat.ranks) for seat in ring)):
        for i in range(len(ring)):
            reached = [ring[(i + j) % len(ring)] for j in range(data + parity)]
            units = tuple(_unit(seat, column, part) for part, seat in enumerate(reached[:data]))
            stripes.append(Stripe(len(stripes), units, tuple(seat.position for seat in reached[data:])))
    held: dict[int, list[tuple[int, int]]] = {seat.position: [] for seat in ring}
    for stripe in stripes:
        for piece, position in enumerate(stripe.holders):
            held[position].append((stripe.index, piece))
    return Placement(
        data,
        parity,
        ring,
        tuple(stripes),
        _places=places,
        _stripes={unit: stripe.index for stripe in stripes for unit in stripe.units if unit is not None},
        _held={position: tuple(pieces) for position, pieces in held.items()},
    )


def place_local(seat: Seat) -> Stripe:
    """The stripe of the local tier: the whole state of each of a node's ranks, and one parity kept by its own agent.

    With one rank that parity is a plain copy.

    Raises:
        ValueError: the node has no rank.
    """
    if not seat.ranks:
        raise ValueError(f"the node at position {seat.position} has no rank to protect")
    return Stripe(seat.position, tuple(Unit(rank, 0) for rank in seat.ranks), (seat.position,))


def unit_bytes(length: int, data: int) -> int:
    """Bytes of a full unit of a state of `length` bytes cut into `data` parts: equal, and a multiple of ALIGNMENT."""
    return -(-length // (data * ALIGNMENT)) * ALIGNMENT


def unit_range(length: int, data: int, part: int) -> tuple[int, int]:
    """The (start, stop) of a part in a state of `length` bytes; the last ones may be short, or empty.

    Raises:
        ValueError: there is no such part.
    """
    if not 0 <= part < data:
        raise ValueError(f"part {part} of a state that is cut into {data}")
    size = unit_bytes(length, data)
    return min(part * size, length), min((part + 1) * size, length)


def crowded(placement: Placement, domains: Mapping[int, str]) -> tuple[Stripe, ...]:
    """The stripes of which one failure domain now holds more than one piece, given the domain of every position.

    That happens when a spare from another domain has taken a place: the loss of that domain may then be too much.
    """

    def is_crowded(stripe: Stripe) -> bool:
        givers = [placement.position_of(unit.rank) for unit in stripe.units if unit is not None]
        held = [domains[position] for position in (*givers, *stripe.holders)]
        return len(set(held)) < len(held)

    return tuple(stripe for stripe in placement.stripes if is_crowded(stripe))


def _check(data: int, parity: int) -> None:
    if data < 1 or parity < 1:
        raise ValueError(f"a code needs at least one data unit and one parity piece, not RS({data}, {parity})")


def _unit(seat: Seat, column: int, part: int) -> Unit | None:
    return Unit(seat.ranks[column], part) if column < len(seat.ranks) else None


def _ring(seats: list[Seat], data: int, parity: int) -> tuple[Seat, ...]:
    """The nodes so ordered that any data + parity consecutive ones are in different failure domains.

    The order of positions where that does it, as it does when every node is its own domain. Otherwise the ring is cut
    into as many rows as one domain may have nodes, all at least data + parity long, and filled column by column, one
    domain after the other, the largest first. A domain that fills all rows then has a column to itself; one that runs
    on into the next column leaves a row between its ends. So an order is found whenever there is one.

    Raises:
        ValueError: there is none.
    """
    nodes, width = len(seats), data + parity
    if nodes < width:
        raise ValueError(f"RS({data}, {parity}) needs {width} nodes in different failure domains; there are {nodes}")
    members: dict[str, list[Seat]] = {}
    for seat in seats:
        members.setdefault(seat.domain, []).append(seat)
    largest_first = sorted(members.values(), key=len, reverse=True)
    rows, most = nodes // width, len(largest_first[0])
    if most > rows:
        smaller = f", or take a code with at most {nodes // most} pieces" if nodes // most > 1 else ""
        raise ValueError(
            f"failure domain {largest_first[0][0].domain!r} holds {most} of {nodes} nodes; RS({data}, {parity}) needs "
            f"{width} domains for each stripe, so at most {rows} nodes in one; put them into more domains{smaller}"
        )
    if _is_apart(seats, width):
        return tuple(seats)
    lengths = [nodes // rows + (row < nodes % rows) for row in range(rows)]
    cells = sorted((column, row) for row in range(rows) for column in range(lengths[row]))
    filled = zip(cells, (seat for group in largest_first for seat in group), strict=True)
    ring = [seat for _, seat in sorted(filled, key=lambda item: (item[0][1], item[0][0]))]
    assert _is_apart(ring, width), "the filled rows keep every domain apart"
    return tuple(ring)


def _is_apart(ring: list[Seat], width: int) -> bool:
    return all(len({ring[(i + j) % len(ring)].domain for j in range(width)}) == width for i in range(len(ring)))
