"""The parity pieces that a keeper holds, while they grow and after.

A piece grows by parity += coefficient * bytes, chunk by chunk, units in any order, each unit from its start to its end.
What was added cannot be taken back, so a unit's progress is remembered: a sender whose connection broke goes on from
there, which is right because a version's bytes do not change. A piece counts only when all its units are finished, each
with the CRC-32 that its sender computed; then the piece gets a CRC-32 of its own, which is verified before every use.

Of each piece two versions are held at most: the agreed one and the one being written, or just written. The memory of a
version that is dropped serves the next one: touching new pages costs more than the code.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from leto_elastic.protect.budget import Budget, age, later
from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.checksum import checksum
from leto_elastic.protect.engines import Engine
from leto_elastic.protect.matrix import Code
from leto_elastic.protect.world import PieceKey, Refusal
from leto_elastic.state.header import NO_TAG


@dataclass
class _Unit:
    length: int
    applied: int = 0
    crc: int = 0
    done: bool = False


@dataclass
class _Piece:
    memory: Bytes
    size: int = 0
    units: dict[int, _Unit] = field(default_factory=dict)
    crc: int | None = None
    readers: int = 0

    @property
    def data(self) -> Bytes:
        return self.memory[: self.size]


@dataclass
class _Shelf:
    """The versions of one piece."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    pieces: dict[int, _Piece] = field(default_factory=dict)
    agreed: int = NO_TAG


class Pieces:
    """All pieces held. Thread-safe.

    Args:
        engine: what multiplies.
        budget: the bytes they may take.
        on_damaged: called with key and tag of a piece that was dropped because its bytes have changed.
    """

    def __init__(self, engine: Engine, budget: Budget, on_damaged: Callable[[PieceKey, int], None]) -> None:
        self._engine = engine
        self._budget = budget
        self._on_damaged = on_damaged
        self._lock = threading.Lock()
        self._shelves: dict[PieceKey, _Shelf] = {}

    def begin(self, key: PieceKey, tag: int, agreed: int, unit: int, length: int) -> int:
        """A unit is about to come; returns the offset from which it is still needed.

        Raises Refusal: a later version is being written, another length than before, or the budget.
        """
        shelf = self._shelf(key)
        with shelf.lock:
            shelf.agreed = later(shelf.agreed, agreed)
            piece = shelf.pieces.get(tag)
            if piece is None:
                piece = self._new(shelf, key, tag, length)
            known = piece.units.get(unit)
            if known is None:
                self._grow(piece, key, length)
                known = piece.units[unit] = _Unit(length)
            if known.length != length:
                raise Refusal(f"unit {unit} of {key} has {known.length} bytes at tag {tag}, not {length}")
            return known.applied

    def add(self, key: PieceKey, tag: int, unit: int, offset: int, data: Bytes, code: Code) -> None:
        """Add bytes of a unit. Raises Refusal when they are not the next ones of a unit that has begun."""
        shelf = self._shelf(key)
        with shelf.lock:
            piece, known = self._growing(shelf, key, tag, unit)
            if offset != known.applied or offset + data.size > known.length:
                raise Refusal(
                    f"bytes {offset} to {offset + data.size} of unit {unit} of {key}: it has {known.length}, "
                    f"the next is {known.applied}"
                )
            column = code.column(unit)[key.piece : key.piece + 1]
            self._engine.update(column, data, [piece.memory[offset : offset + data.size]])
            known.crc = checksum(data, known.crc)
            known.applied += data.size

    def finish(self, key: PieceKey, tag: int, unit: int, crc: int, units: Collection[int]) -> None:
        """A unit has come as a whole; with the last of `units` the piece is complete.

        Raises Refusal when bytes are missing or others than the sender's; then the piece is dropped.
        """
        shelf = self._shelf(key)
        with shelf.lock:
            piece = shelf.pieces.get(tag)
            if piece is None or unit not in piece.units:
                raise Refusal(f"unit {unit} of {key} was not begun at tag {tag}")
            known = piece.units[unit]
            if known.applied != known.length:
                raise Refusal(f"unit {unit} of {key} has {known.applied} of {known.length} bytes")
            if known.crc != crc:
                self._drop(shelf, tag)
                raise Refusal(f"unit {unit} of {key} has checksum {known.crc:08x}, its sender says {crc:08x}")
            known.done = True
            if piece.crc is None and all(index in piece.units and piece.units[index].done for index in units):
                piece.crc = checksum(piece.data)

    @contextlib.contextmanager
    def reading(self, key: PieceKey, tag: int) -> Iterator[Bytes]:
        """The bytes of a complete piece, just verified, valid inside the context.

        Raises Refusal when it is not here, not complete, or damaged (then it is dropped).
        """
        shelf = self._shelf(key)
        with shelf.lock:
            piece = shelf.pieces.get(tag)
            if piece is None or piece.crc is None:
                raise Refusal(f"{key} is not whole here at tag {tag}; there are {sorted(shelf.pieces)}")
            if checksum(piece.data) != piece.crc:
                self._drop(shelf, tag)
                self._on_damaged(key, tag)
                raise Refusal(f"{key} is damaged at tag {tag}")
            piece.readers += 1
        try:
            yield piece.data
        finally:
            with shelf.lock:
                piece.readers -= 1

    def complete(self) -> list[tuple[PieceKey, int]]:
        """Key and tag of all complete pieces, just verified."""
        with self._lock:
            keys = [(key, tag) for key, shelf in self._shelves.items() for tag in tuple(shelf.pieces)]
        found = []
        for key, tag in keys:
            with contextlib.suppress(Refusal), self.reading(key, tag):
                found.append((key, tag))
        return found

    def _shelf(self, key: PieceKey) -> _Shelf:
        with self._lock:
            return self._shelves.setdefault(key, _Shelf())

    def _growing(self, shelf: _Shelf, key: PieceKey, tag: int, unit: int) -> tuple[_Piece, _Unit]:
        piece = shelf.pieces.get(tag)
        if piece is None or unit not in piece.units:
            raise Refusal(f"unit {unit} of {key} was not begun at tag {tag}")
        return piece, piece.units[unit]

    def _new(self, shelf: _Shelf, key: PieceKey, tag: int, length: int) -> _Piece:
        newest = max(shelf.pieces, key=age, default=NO_TAG)
        if age(tag) < age(newest):
            raise Refusal(f"tag {tag} of {key} is superseded by {newest}")
        dropped = [old for old in shelf.pieces if old != shelf.agreed]
        self._budget.take(length, f"{key} at tag {tag}", instead=sum(shelf.pieces[old].size for old in dropped))
        spare = [shelf.pieces.pop(old) for old in dropped]
        memory = next((piece.memory for piece in spare if not piece.readers and piece.memory.size >= length), None)
        if memory is None:
            memory = self._zeros(length, length, key)
        else:
            memory.fill(0)
        piece = shelf.pieces[tag] = _Piece(memory, length)
        return piece

    def _grow(self, piece: _Piece, key: PieceKey, length: int) -> None:
        """Parity is as long as the longest unit."""
        if length <= piece.size:
            return
        self._budget.take(length - piece.size, f"{key}")
        if length > piece.memory.size:
            memory = self._zeros(length, length - piece.size, key)
            memory[: piece.size] = piece.data
            piece.memory = memory
        piece.size = length

    def _zeros(self, length: int, taken: int, key: PieceKey) -> Bytes:
        try:
            return np.zeros(length, dtype=np.uint8)
        except MemoryError as error:
            self._budget.give(taken)
            raise Refusal(f"no memory for {length} bytes of {key}") from error

    def _drop(self, shelf: _Shelf, tag: int) -> None:
        self._budget.give(shelf.pieces.pop(tag).size)
