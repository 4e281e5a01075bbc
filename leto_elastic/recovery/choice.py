"""Which version everyone goes back to when memory is lost: a pure function of what every node still has.

Every agent says where its slots stand, which parity it keeps whole and whose extras it has (`NodeStanding`). From the
same standings every agent comes to the same `Choice`: the newest version that each rank either still has or can be
given again. What it guarantees, given that the claims are true:

* A rank that has the version goes to it from its own memory: it stands there, rolls forward to it, or is *put back*
  from a snapshot buffer or from the pre-images that a running update keeps.
* Any other rank is *rebuilt*: from a replica, from the parity of its node, or from the stripes over the nodes. A source
  is only read where the version is already in memory or is put there by the put-back. A rank that has yet to roll
  forward is no source, for it does so only after everyone is there.
* With at most m nodes lost since the last protected version, that version is chosen or a newer one.

A rank whose memory lives but has no common version with the others (it was itself rebuilt not long ago) is rebuilt like
a lost one, only if nothing else is left. Parity of one version may come from several generations: the state of a
version is the same bits whenever it is reached.

Nothing is lost, and the positions are such as a failure of processes leaves behind: there is nothing to choose. They may
also be what an interrupted recovery left, some ranks back at an early version and some not yet; then a version is
chosen as if something were lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from leto_elastic.errors import StateError
from leto_elastic.protect.placement import Placement, Stripe
from leto_elastic.recovery.resolution import resolve
from leto_elastic.state.header import NO_TAG, Phase, Position, version_of

PutBack = Literal["buffer 0", "buffer 1", "undo"]


class SlotStanding(msgspec.Struct, frozen=True):
    """What the memory of a rank holds.

    Args:
        rank: the rank.
        lost: its segments are gone or damaged, or not yet whole again; what follows is not looked at.
        word: header word, see `Position.unpack`.
        buffers: tags of the two snapshot buffers.
        target: tag of the version whose pre-images the running update keeps; -1 for none.
        replicas: ranks whose state is equal on purpose, itself included or not.
        length: bytes of its stream.
    """

    rank: int
    lost: bool
    word: int = 0
    buffers: tuple[int, int] = (NO_TAG, NO_TAG)
    target: int = NO_TAG
    replicas: list[int] = []
    length: int = 0


class NodeStanding(msgspec.Struct, frozen=True):
    """What a node has.

    Args:
        position: of the node.
        slots: its ranks.
        pieces: whole parity pieces of stripes over nodes, (tag, stripe index, parity index).
        extras: (rank, version) for each X that its agent keeps, of ranks here or elsewhere.
        local: tags of the whole parities of the local tier.
    """

    position: int
    slots: list[SlotStanding]
    pieces: list[tuple[int, int, int]] = []
    extras: list[tuple[int, int]] = []
    local: list[int] = []


class Piece(msgspec.Struct, frozen=True):
    """Parity piece `index` of a stripe, as kept at `position` under `tag`."""

    index: int
    position: int
    tag: int


class Part(msgspec.Struct, frozen=True):
    """How to decode part `part` of a rank: the k shards of a stripe to read (units that are None are zeros).

    Args:
        part: of the rank's stream.
        stripe: index of the stripe; -1 for the local one.
        units: indices of the units of the stripe to read from their ranks.
        pieces: parity to read.
    """

    part: int
    stripe: int
    units: list[int]
    pieces: list[Piece]


class Rebuild(msgspec.Struct, frozen=True):
    """Where a rank's state comes from.

    Args:
        extras: position of the node to take X from.
        replica: the rank to copy W from; -1: it is decoded.
        parts: how, when it is decoded: one part per data unit of the code, or the whole as one with the local tier.
    """

    extras: int
    replica: int = -1
    parts: list[Part] = []


class Choice(msgspec.Struct, frozen=True):
    """What to go on with.

    Args:
        version: that of all ranks; None when nothing is lost, and a resolution of the positions is enough.
        put_back: the surviving ranks whose W must be changed, and where its bytes are.
        rebuild: ranks whose state comes from others: all lost ones, and any that lives without the version.
        reason: for a human.
    """

    version: int | None
    put_back: Mapping[int, PutBack]
    rebuild: Mapping[int, Rebuild]
    reason: str


def available(position: Position, buffers: Iterable[int], target: int, passed: bool) -> frozenset[int]:
    """The versions that a slot has or can come to by itself.

    Args:
        position: its header's.
        buffers: tags of its snapshot buffers.
        target: tag of the version whose pre-images the running update keeps.
        passed: some rank proves that the vote of its step passed.
    """
    return _readable(position, buffers, target) | _ahead(position, passed)


def choose(
    standings: Iterable[NodeStanding], placement: Placement | None, local: Mapping[int, Stripe] | None = None
) -> Choice:
    """The choice for what all nodes of the job, replaced ones included, still have.

    Args:
        standings: of every node.
        placement: the stripes over the nodes; None without the global tier.
        local: the local tier's stripe of each position; None without it.

    Raises:
        StateError: no version is left; names what is missing of each rank.
    """
    view = _View(standings, placement, local or {})
    positions = {rank: Position.unpack(slot.word) for rank, slot in view.slots.items() if not slot.lost}
    if len(positions) == len(view.slots) and _is_resolvable(positions):
        return Choice(None, {}, {}, "no memory is lost")
    readable = {
        rank: _readable(at, view.slots[rank].buffers, view.slots[rank].target) for rank, at in positions.items()
    }
    reachable = {rank: readable[rank] | _ahead(at, _passed(at, positions)) for rank, at in positions.items()}
    versions = sorted(set().union(*reachable.values()), reverse=True)
    lost = [rank for rank in sorted(view.slots) if rank not in positions]
    failed: list[tuple[int, int, list[str]]] = []
    for generous in (False, True):
        for version in versions:
            without = [rank for rank in sorted(positions) if version not in reachable[rank]]
            if bool(without) != generous:
                continue
            sources = {rank for rank in positions if version in readable[rank]}
            tried = {rank: view.rebuild(rank, version, sources) for rank in sorted([*lost, *without])}
            missing = [f"rank {rank}: {why}" for rank, why in tried.items() if isinstance(why, str)]
            if missing:
                failed.append((len(missing), -version, missing))
                continue
            found = {rank: source for rank, source in tried.items() if isinstance(source, Rebuild)}
            stay = {rank: _put_back(positions[rank], view.slots[rank], version) for rank in positions.keys() - found}
            put_back = {rank: source for rank, source in sorted(stay.items()) if source is not None}
            return Choice(version, put_back, found, _told(version, positions, put_back, found))
    if not failed:
        raise StateError("no rank has any version of its state left; restart from a checkpoint")
    _, version, missing = min(failed)
    raise StateError(
        f"the lost state cannot be restored, the nearest is version {-version}: {'; '.join(missing)}; "
        "restart from a checkpoint"
    )


@dataclass(slots=True)
class _View:
    """The standings, as looked up."""

    slots: dict[int, SlotStanding]
    placement: Placement | None
    local: Mapping[int, Stripe]
    _at: dict[int, int]  # rank -> position
    _pieces: dict[tuple[int, int, int], Piece]  # version, stripe, index
    _local: dict[tuple[int, int], Piece]  # version, position
    _extras: dict[tuple[int, int], int]  # rank, version -> position

    def __init__(
        self, standings: Iterable[NodeStanding], placement: Placement | None, local: Mapping[int, Stripe]
    ) -> None:
        self.placement, self.local = placement, local
        self.slots, self._at, self._pieces, self._local, self._extras = {}, {}, {}, {}, {}
        for node in sorted(standings, key=lambda node: node.position):
            self.slots.update({slot.rank: slot for slot in node.slots})
            self._at.update({slot.rank: node.position for slot in node.slots})
            for tag, stripe, index in sorted(node.pieces):
                self._pieces[version_of(tag), stripe, index] = Piece(index, node.position, tag)
            for tag in sorted(node.local):
                self._local[version_of(tag), node.position] = Piece(0, node.position, tag)
            for rank, version in node.extras:
                self._extras.setdefault((rank, version), node.position)

    def rebuild(self, rank: int, version: int, sources: set[int]) -> Rebuild | str:
        """How the rank comes to the version by help of ranks that have it; or what is missing."""
        keeper = self._extras.get((rank, version))
        if keeper is None:
            return "no node keeps its extras"
        replicas = [r for r in sorted(sources) if rank in self.slots[r].replicas and r != rank]
        if replicas:
            return Rebuild(keeper, replicas[0])
        local = self._decode_locally(rank, version, sources)
        if local is not None:
            return Rebuild(keeper, parts=[local])
        if self.placement is None:
            return "no other rank has its state"
        parts: list[Part] = []
        for part in range(self.placement.data):
            stripe = self.placement.stripe_of(rank, part)
            units = [i for i, unit in enumerate(stripe.units) if unit is not None and unit.rank in sources]
            zeros = stripe.units.count(None)
            keys = ((version, stripe.index, index) for index in range(len(stripe.holders)))
            pieces = [self._pieces[key] for key in keys if key in self._pieces]
            have, need = zeros + len(units) + len(pieces), self.placement.data
            if have < need:
                return f"part {part} has {have} of the {need} pieces it needs (of {need + len(stripe.holders)})"
            parts.append(Part(part, stripe.index, units, pieces[: need - zeros - len(units)]))
        return Rebuild(keeper, parts=parts)

    def _decode_locally(self, rank: int, version: int, sources: set[int]) -> Part | None:
        position = self._at[rank]
        stripe, piece = self.local.get(position), self._local.get((version, position))
        if stripe is None or piece is None:
            return None
        units = [i for i, unit in enumerate(stripe.units) if unit is not None and unit.rank in sources]
        return Part(0, -1, units, [piece]) if len(units) == len(stripe.units) - 1 else None


def _readable(position: Position, buffers: Iterable[int], target: int) -> frozenset[int]:
    """The versions whose bytes are in the slot's memory now."""
    kept = {version_of(tag) for tag in buffers if tag != NO_TAG}
    match position.phase:
        case Phase.SECTION | Phase.COMPUTE | Phase.VOTE | Phase.DONE:
            kept.add(position.step)
        case Phase.UPDATE if target != NO_TAG and version_of(target) == position.step:
            kept.add(position.step)
    return frozenset(kept)


def _ahead(position: Position, passed: bool) -> frozenset[int]:
    """The version that the trainer of a slot comes to by rolling forward."""
    forward = position.phase is Phase.UPDATE or (position.phase is Phase.VOTE and passed)
    return frozenset({position.step + 1}) if forward else frozenset()


def _passed(position: Position, positions: Mapping[int, Position]) -> bool:
    """Whether some rank proves that the vote of this rank's step passed."""
    step = position.step
    return any(at.step > step or (at.step == step and at.phase is Phase.UPDATE) for at in positions.values())


def _is_resolvable(positions: Mapping[int, Position]) -> bool:
    try:
        resolve(positions)
    except StateError:
        return False
    return True


def _put_back(at: Position, slot: SlotStanding, version: int) -> PutBack | None:
    """Where a slot that has the version finds it; None when it stands there or rolls forward to it."""
    stands = at.step == version and at.phase not in (Phase.UPDATE, Phase.SETUP)
    if stands or (at.step == version - 1 and at.phase in (Phase.VOTE, Phase.UPDATE)):
        return None
    tags = [version_of(tag) if tag != NO_TAG else None for tag in slot.buffers]
    if version in tags:
        return "buffer 0" if tags[0] == version else "buffer 1"
    return "undo"


def _told(
    version: int, positions: Mapping[int, Position], put_back: Mapping[int, PutBack], rebuild: Mapping[int, Rebuild]
) -> str:
    newest = max(at.step + (at.phase is Phase.UPDATE) for at in positions.values())
    parts = [f"version {version}" + (f", {newest - version} steps back" if newest > version else "")]
    for what, ranks in (("put back", put_back), ("rebuilt", rebuild)):
        if ranks:
            parts.append(f"{what}: {', '.join(str(rank) for rank in sorted(ranks))}")
    return "; ".join(parts)
