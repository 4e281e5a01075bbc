"""A lost stream, from what is left of it: a replica's, the local stripe, or any k pieces of each stripe over nodes.

What is written counts only when every part matches the CRC-32 that its owner computed when the version was protected.
(Without a tag there is no such sum; then only a replica will do, with the sum that it computes while it sends.) A
source that refuses, breaks or is silent is left out and another combination of pieces is tried; so it is when a result
does not match. Receiving runs ahead of decoding, in one thread for each source.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np

from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.desk import Desk
from leto_elastic.protect.engines import Engine
from leto_elastic.protect.field import Matrix
from leto_elastic.protect.handshake import Identity
from leto_elastic.protect.mapped import Slot, Stream
from leto_elastic.protect.matrix import Code, decode_rows
from leto_elastic.protect.messages import CHUNK, ReadPiece, ReadUnit
from leto_elastic.protect.placement import Stripe, Unit, unit_range
from leto_elastic.protect.reading import Source, chunk_sizes, from_memory, from_peer
from leto_elastic.protect.store import Pieces
from leto_elastic.protect.world import LOCAL, CannotRebuild, Disconnected, PieceKey, Refusal, Silent, World
from leto_elastic.state.header import NO_TAG

COMBINATIONS = 64  # of pieces of one stripe that are tried

Open = Callable[[int], Source]
"""Opens a source of so many bytes."""

_COPY: Matrix = np.ones((1, 1), dtype=np.uint8)


class Loss(NamedTuple):
    """What is to be rebuilt.

    Args:
        rank: whose stream.
        version: that it is wanted at.
        tag: the protected version, `NO_TAG` for none.
        lost: the ranks whose memory is gone, this one included.
        sources: the positions that have something.
        sums: CRC-32 of each part at the tag; None without one.
    """

    rank: int
    version: int
    tag: int
    lost: Collection[int]
    sources: Collection[int]
    sums: list[int] | None


class _Piece(NamedTuple):
    """A piece of a stripe that may be had: its number in the code, and how; None when it is all zeros."""

    number: int
    open: Open | None


class _Bad(Exception):
    """A source failed while it was read."""

    def __init__(self, source: int, reason: str, *, broke: bool) -> None:
        super().__init__(reason)
        self.source = source
        self.broke = broke


class Rebuilder:
    """Rebuilds streams; from several threads at once, if so wished.

    Args:
        me: who we are.
        desk: what is here.
        pieces: parity that is here.
        engine: what multiplies.
        silence: seconds that a source may be silent.
    """

    def __init__(self, me: Identity, desk: Desk, pieces: Pieces, engine: Engine, silence: float) -> None:
        self._me = me
        self._desk = desk
        self._pieces = pieces
        self._engine = engine
        self._silence = silence

    def rebuild(self, world: World, slot: Slot, loss: Loss) -> None:
        """Write the whole stream into the slot. Raises CannotRebuild, with every source's reason."""
        reasons: list[str] = []
        for way in (self._from_replicas, self._from_local, self._from_nodes):
            if way(world, slot, loss, reasons):
                return
        raise CannotRebuild(
            f"rank {loss.rank} cannot be rebuilt at version {loss.version}: "
            + ("; ".join(dict.fromkeys(reasons)) or "nothing that protects it is left")
        )

    def _from_replicas(self, world: World, slot: Slot, loss: Loss, reasons: list[str]) -> bool:
        for replica in slot.manifest.replicas:
            if replica in loss.lost or not self._usable(world, world.ranks.get(replica, -1), loss):
                continue
            parts = len(loss.sums) if loss.sums is not None else world.parts
            if all(self._part_of(world, slot, loss, replica, part, parts, reasons) for part in range(parts)):
                return True
        return False

    def _part_of(
        self, world: World, slot: Slot, loss: Loss, replica: int, part: int, parts: int, reasons: list[str]
    ) -> bool:
        """One part of the stream, copied from a rank whose stream is equal."""
        start, stop = unit_range(slot.weights.size, parts, part)
        source = self._unit(world, loss, Unit(replica, part), parts)
        try:
            self._combine_again(_COPY, [source], slot.weights, start, stop - start)
        except _Bad as bad:
            reasons.append(str(bad))
            return False
        return self._matches(slot.weights, loss, start, stop, reasons, f"rank {replica}")

    def _from_local(self, world: World, slot: Slot, loss: Loss, reasons: list[str]) -> bool:
        stripe, size = world.local, slot.weights.size
        unit = Unit(loss.rank, 0)
        if stripe is None or unit not in stripe.units or loss.tag == NO_TAG:
            return False
        code = Code(len(stripe.units), 1)
        pieces = self._available(world, stripe, loss, parts=1, local=True)
        return self._decode(code, pieces, stripe.units.index(unit), slot.weights, (0, size), loss, reasons)

    def _from_nodes(self, world: World, slot: Slot, loss: Loss, reasons: list[str]) -> bool:
        if world.placement is None or world.code is None or loss.tag == NO_TAG:
            return False
        parts = world.placement.data
        for part in range(parts):
            stripe = world.placement.stripe_of(loss.rank, part)
            pieces = self._available(world, stripe, loss, parts, local=False)
            span = unit_range(slot.weights.size, parts, part)
            if not self._decode(world.code, pieces, part, slot.weights, span, loss, reasons):
                return False
        return True

    def _decode(
        self,
        code: Code,
        pieces: list[_Piece],
        wanted: int,
        target: Stream,
        span: tuple[int, int],
        loss: Loss,
        reasons: list[str],
    ) -> bool:
        """One unit, from the first k pieces that do."""
        start, stop = span
        if start == stop:
            return True
        if len(pieces) < code.data:
            reasons.append(f"only {len(pieces)} of the {code.data} pieces that RS({code.data}, {code.parity}) needs")
            return False
        bad: set[int] = set()
        for chosen in itertools.islice(itertools.combinations(pieces, code.data), COMBINATIONS):
            if any(piece.number in bad for piece in chosen):
                continue
            rows = decode_rows(code.matrix, [piece.number for piece in chosen], [wanted])
            there = [index for index, piece in enumerate(chosen) if piece.open is not None]
            sources = [piece.open for piece in chosen if piece.open is not None]
            try:
                self._combine_again(np.ascontiguousarray(rows[:, there]), sources, target, start, stop - start)
            except _Bad as error:
                bad.add(chosen[there[error.source]].number)
                reasons.append(str(error))
                continue
            if self._matches(target, loss, start, stop, reasons, f"pieces {[piece.number for piece in chosen]}"):
                return True
        return False

    def _available(self, world: World, stripe: Stripe, loss: Loss, parts: int, *, local: bool) -> list[_Piece]:
        """The pieces that may be had: zeros first, they cost nothing, then data, which needs less arithmetic."""
        zeros = [_Piece(number, None) for number, unit in enumerate(stripe.units) if unit is None]
        data = [
            _Piece(number, self._unit(world, loss, unit, parts))
            for number, unit in enumerate(stripe.units)
            if unit is not None and unit.rank not in loss.lost and self._usable(world, world.ranks[unit.rank], loss)
        ]
        parity = [
            _Piece(
                len(stripe.units) + piece,
                self._parity(world, loss, PieceKey(LOCAL if local else stripe.index, piece), position),
            )
            for piece, position in enumerate(stripe.holders)
            if self._usable(world, position, loss)
        ]
        return zeros + data + parity

    @staticmethod
    def _usable(world: World, position: int, loss: Loss) -> bool:
        return position == world.position or (position in loss.sources and position in world.peers)

    def _unit(self, world: World, loss: Loss, unit: Unit, parts: int) -> Open:
        def source(length: int) -> Source:
            position = world.ranks[unit.rank]
            request = ReadUnit(world.epoch, unit.rank, loss.version, loss.tag, unit.part, parts, length)
            if position == world.position:
                return self._own_unit(request, length)
            return from_peer(world.peers[position], self._me, request, length, self._silence)

        return source

    def _parity(self, world: World, loss: Loss, key: PieceKey, position: int) -> Open:
        def source(length: int) -> Source:
            if position == world.position:
                return self._own_piece(key, loss.tag, length)
            request = ReadPiece(world.epoch, loss.tag, key.stripe, key.piece, length)
            return from_peer(world.peers[position], self._me, request, length, self._silence)

        return source

    @contextlib.contextmanager
    def _own_unit(self, request: ReadUnit, length: int) -> Iterator[Iterator[Bytes]]:
        stream, start, stop = self._desk.unit(request)
        yield from_memory(stream, start, stop, length)

    @contextlib.contextmanager
    def _own_piece(self, key: PieceKey, tag: int, length: int) -> Iterator[Iterator[Bytes]]:
        with self._pieces.reading(key, tag) as data:
            yield from_memory(Stream([data]), 0, min(length, data.size), length)

    def _combine_again(self, rows: Matrix, sources: list[Open], target: Stream, start: int, length: int) -> None:
        """`_combine`, from the start over new connections when one broke: once, for it may have been an accident."""
        try:
            self._combine(rows, [source(length) for source in sources], target, start, length)
        except _Bad as bad:
            if not bad.broke:
                raise
            self._combine(rows, [source(length) for source in sources], target, start, length)

    def _combine(self, rows: Matrix, sources: list[Source], target: Stream, start: int, length: int) -> None:
        """target[start:start + length] = rows * sources. Raises _Bad."""
        out = np.empty(min(CHUNK, length), dtype=np.uint8)
        with contextlib.ExitStack() as stack:
            streams = [_attributed(number, stack, source) for number, source in enumerate(sources)]
            for offset, size in chunk_sizes(length):
                chunks = [next(stream) for stream in streams]
                self._engine.dot(rows, chunks, [out[:size]])
                target.write(start + offset, out[:size])
            for stream in streams:  # a source is good only when its end is
                next(stream, None)

    @staticmethod
    def _matches(target: Stream, loss: Loss, start: int, stop: int, reasons: list[str], source: str) -> bool:
        """Whether what was written there is what it should be."""
        if loss.sums is None:
            return True
        for part, expected in enumerate(loss.sums):
            low, high = unit_range(target.size, len(loss.sums), part)
            if start <= low and high <= stop and target.checksum(low, high) != expected:
                reasons.append(f"part {part} from {source} does not match its checksum")
                return False
        return True


def _attributed(number: int, stack: contextlib.ExitStack, source: Source) -> Iterator[Bytes]:
    """The chunks of a source; its errors become _Bad."""
    try:
        yield from stack.enter_context(source)
    except (Refusal, Disconnected) as error:
        raise _Bad(
            number, str(error), broke=isinstance(error, Disconnected) and not isinstance(error, Silent)
        ) from error
