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
a lost one, only if nothing else is left. What is decoded comes from one tag, of which the sums must be there too, to
verify it. Whatever the tag, the state of a version is the same bits whenever it is reached.

A version can be decoded for the lost ranks, and yet not for the next one to be lost: an attempt that had not come to
its end. Only `Choice.tag` may therefore take the place of what ranks keep as protected.

Nothing is lost, and the positions are such as a failure of processes leaves behind: there is nothing to choose. They
may also be what an interrupted recovery left, some ranks back at an early version and some not yet; then a version is
chosen as if something were lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        sums: (rank, tag) for each set of sums that its agent keeps, of ranks here or elsewhere; a rank's are sent when
            all else of that tag is whole at its keepers. None: not told, and taken to be there.
    """

    position: int
    slots: list[SlotStanding]
    pieces: list[tuple[int, int, int]] = []
    extras: list[tuple[int, int]] = []
    local: list[int] = []
    sums: list[tuple[int, int]] | None = None


class Piece(msgspec.Struct, frozen=True):
    """Parity piece `index` of a stripe, as kept at `position`."""

    index: int
    position: int


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
        tag: what it is decoded from, and verified by.
        parts: how, when it is decoded: one part per data unit of the code, or the whole as one with the local tier.
    """

    extras: int
    replica: int = -1
    tag: int = NO_TAG
    parts: list[Part] = []


class Choice(msgspec.Struct, frozen=True):
    """What to go on with.

    Args:
        version: that of all ranks; None when nothing is lost, and a resolution of the positions is enough.
        put_back: the surviving ranks whose W must be changed, and where its bytes are.
        rebuild: ranks whose state comes from others: all lost ones, and any that lives without the version.
        reason: for a human.
        tag: the newest tag under which every rank's version is whole at its keepers, but for what is lost: it is as
            good as agreed. -1: none is known to be; then what ranks keep of older versions must be left alone.
    """

    version: int | None
    put_back: Mapping[int, PutBack]
    rebuild: Mapping[int, Rebuild]
    reason: str
    tag: int = NO_TAG


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
    readable = {r: _readable(at, view.slots[r].buffers, view.slots[r].target) for r, at in positions.items()}
    ahead = {rank: _ahead(at, _passed(at, positions)) for rank, at in positions.items()}
    reachable = {rank: readable[rank] | ahead[rank] for rank in positions}
    versions = sorted(set().union(*reachable.values()), reverse=True)
    lost = [rank for rank in sorted(view.slots) if rank not in positions]
    failed: list[tuple[bool, int, int, list[str]]] = []
    for generous in (False, True):
        for version in versions:
            without = [rank for rank in sorted(positions) if version not in reachable[rank]]
            if bool(without) != generous:
                continue
            sources = {rank for rank in positions if version in readable[rank]}
            tried = {rank: view.rebuild(rank, version, sources) for rank in sorted([*lost, *without])}
            missing = [f"rank {rank}: {why}" for rank, why in tried.items() if isinstance(why, str)]
            if missing:
                failed.append((not view.is_known(version), len(missing), -version, missing))
                continue
            found = {rank: source for rank, source in tried.items() if isinstance(source, Rebuild)}
            put_back = {
                rank: _source(at, view.slots[rank], version)
                for rank, at in sorted(positions.items())
                if rank not in found and version not in ahead[rank] and not _stands(at, version)
            }
            told = _told(version, positions, put_back, found)
            return Choice(version, put_back, found, told, view.sent_by_all(version))
    if not failed:
        raise StateError("no rank has any version of its state left; restart from a checkpoint")
    *_, version, missing = min(failed)
    raise StateError(
        f"the lost state cannot be restored, the nearest is version {-version}: {'; '.join(missing)}; "
        "restart from a checkpoint"
    )


class _View:
    """The standings, as looked up."""

    def __init__(
        self, standings: Iterable[NodeStanding], placement: Placement | None, local: Mapping[int, Stripe]
    ) -> None:
        nodes = sorted(standings, key=lambda node: node.position)
        self.slots = {slot.rank: slot for node in nodes for slot in node.slots}
        self._placement, self._local = placement, local
        self._at = {slot.rank: node.position for node in nodes for slot in node.slots}
        self._pieces = {(tag, stripe, i): Piece(i, n.position) for n in nodes for tag, stripe, i in n.pieces}
        self._locals = {(tag, node.position) for node in nodes for tag in node.local}
        self._extras = {known: node.position for node in reversed(nodes) for known in node.extras}
        told = [node.sums for node in nodes if node.sums is not None]
        self._sums = {known for sums in told for known in sums} if told else None
        tags = [tag for tag, _, _ in self._pieces] + [tag for tag, _ in self._locals]
        self._tags = sorted({*tags, *(tag for _, tag in self._sums or ())}, reverse=True)

    def sent_by_all(self, version: int) -> int:
        """The newest tag of the version that every rank had sent; -1 for none."""
        tags = (tag for tag in self._tags if version_of(tag) == version)
        return next((t for t in tags if self._sums and all((rank, t) in self._sums for rank in self.slots)), NO_TAG)

    def is_known(self, version: int) -> bool:
        """Whether any keeper has something of a version."""
        return any(version_of(tag) == version for tag in self._tags)

    def rebuild(self, rank: int, version: int, sources: set[int]) -> Rebuild | str:
        """How the rank comes to the version by help of ranks that have it; or what is missing."""
        keeper = self._extras.get((rank, version))
        if keeper is None:
            return "no node keeps its extras"
        replica = min((r for r in sources if rank in self.slots[r].replicas and r != rank), default=-1)
        if replica >= 0:
            return Rebuild(keeper, replica)
        missing = "no other rank has its state, and no parity of it is whole"
        for tag in self._tags:
            if version_of(tag) == version:
                parts = self._decode(rank, tag, sources)
                if not isinstance(parts, str):
                    return Rebuild(keeper, tag=tag, parts=parts)
                missing = parts
        return missing

    def _decode(self, rank: int, tag: int, sources: set[int]) -> list[Part] | str:
        if self._sums is not None and (rank, tag) not in self._sums:
            return "no node keeps its sums"
        local = self._decode_locally(rank, tag, sources)
        if local is not None:
            return [local]
        if self._placement is None:
            return "its node's parity or another rank of its node is missing"
        parts: list[Part] = []
        need = self._placement.data
        for part in range(need):
            stripe = self._placement.stripe_of(rank, part)
            units = [i for i, unit in enumerate(stripe.units) if unit is not None and unit.rank in sources]
            zeros = stripe.units.count(None)
            keys = ((tag, stripe.index, index) for index in range(len(stripe.holders)))
            pieces = [self._pieces[key] for key in keys if key in self._pieces]
            have = zeros + len(units) + len(pieces)
            if have < need:
                return f"part {part} has {have} of the {need} pieces it needs (of {need + len(stripe.holders)})"
            parts.append(Part(part, stripe.index, units, pieces[: need - zeros - len(units)]))
        return parts

    def _decode_locally(self, rank: int, tag: int, sources: set[int]) -> Part | None:
        position = self._at[rank]
        stripe = self._local.get(position)
        if stripe is None or (tag, position) not in self._locals:
            return None
        units = [i for i, unit in enumerate(stripe.units) if unit is not None and unit.rank in sources]
        return Part(0, -1, units, [Piece(0, position)]) if len(units) == len(stripe.units) - 1 else None


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


def _stands(at: Position, version: int) -> bool:
    """Whether W is that version."""
    return at.step == version and at.phase not in (Phase.SETUP, Phase.UPDATE)


def _source(at: Position, slot: SlotStanding, version: int) -> PutBack:
    """Where a slot that has the version finds it, and is not there by itself."""
    kept = [tag != NO_TAG and version_of(tag) == version for tag in slot.buffers]
    if any(kept):
        return "buffer 0" if kept[0] else "buffer 1"
    assert at.phase is Phase.UPDATE, "else the version is not there"
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
