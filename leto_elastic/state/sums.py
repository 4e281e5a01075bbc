"""Checksums of a trainer's segments that are true at every instant, so that what lies in files can be verified.

A unit is a chunk of the update, the tail of a coupled optimizer, the rest (what no update changes) or the gradients.
Each unit has a row for even and one for odd versions: (version, CRC-32). The row of version s+1 is written when the
unit has come there and before the header says so, over that of s-1, which nobody needs any more. So whatever the header
says, the row it speaks of is whole, and the row of the version before is there too, for the pre-image of a torn chunk.

They are kept only with `state.retain: file`, where bytes outlive all processes that could vouch for them. They cost one
more reading of parameters, optimizer tensors and gradients a step, of which the update has just had a chunk in cache.
Whatever changes parameters outside of the optimizer's step and the functions of `each_step` is found as damage.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from leto_elastic.errors import StateError
from leto_elastic.state.arena import Arena, aligned
from leto_elastic.state.header import Phase, Position
from leto_elastic.state.layout import Manifest, Place, merge

Checksum = Callable[[int, int, int], int]
"""(address, bytes, the CRC-32 of what comes before) -> CRC-32."""

_ROW = struct.Struct("<qI4x")
_STATIC = 0  # the version of what no update changes


def units(manifest: Manifest, grads: int) -> list[list[Place]]:
    """The ranges of each unit: the chunks, the tail, the rest, the gradients (a segment of `grads` bytes)."""
    trained = sum(manifest.group_sizes)
    changing = {i for chunk in manifest.chunks for i in range(chunk.start, chunk.stop)}
    tail: list[Place] = []
    if not manifest.elementwise:
        changing = set(range(trained))
        tail = merge(spec.place for spec in [*manifest.weights[:trained], *manifest.optim])
    rest = [s.place for s in [*manifest.weights, *manifest.optim] if s.param not in changing]
    rest += [spec.place for spec in manifest.buffers]
    return [*(chunk.ranges for chunk in manifest.chunks), tail, merge(rest), [Place("grads", 0, grads)]]


def bytes_needed(chunks: int) -> int:
    """Of the segment for a layout of so many chunks."""
    return aligned(2 * (chunks + 3) * _ROW.size)


class Sums:
    """The checksums of one layout.

    Args:
        manifest: the layout; its segment `sums` holds the rows.
        arenas: all segments, by name.
        checksum: how to make one.
    """

    def __init__(self, manifest: Manifest, arenas: Mapping[str, Arena], checksum: Checksum) -> None:
        self._units = units(manifest, arenas["grads"].size)
        self._arenas = arenas
        self._checksum = checksum
        self._rows = arenas[manifest.sums].bytes(0, bytes_needed(len(manifest.chunks)))
        self._tail = len(manifest.chunks)
        self._undo = arenas.get(manifest.undo)

    # ---- by the trainer, each before the header says so

    def settle(self, version: int) -> None:
        """Everything is at `version`, in a layout that nobody has used yet."""
        self.retouched(version)
        self._note(self._tail + 1, _STATIC)

    def updated(self, chunk: int, version: int) -> None:
        """A chunk has come to `version`."""
        self._note(chunk, version)

    def retouched(self, version: int) -> None:
        """Something else than the optimizer may have changed what is at `version`."""
        for unit in range(self._tail + 1):
            self._note(unit, version)

    def skipped(self, version: int) -> None:
        """Everything is at `version` without a change."""
        for unit in range(self._tail + 1):
            _ROW.pack_into(self._rows, self._at(unit, version), version, self._row(unit, version - 1)[1])

    def saved(self, step: int) -> None:
        """The gradients of `step` are in their segment."""
        self._note(self._tail + 2, step)

    # ---- by whoever takes the state up

    def check(self, position: Position) -> None:
        """Raises StateError for the first thing that does not match where the header stands."""
        step, done = position.step, position.chunk if position.phase is Phase.UPDATE else 0
        torn = position.phase is Phase.UPDATE and position.torn
        for chunk in range(self._tail):
            if torn and chunk == done:
                self._check_undo(chunk, step)
            else:
                self._check(chunk, step + (chunk < done), f"chunk {chunk}")
        tail, torn_tail = bool(self._units[self._tail]), torn and done == self._tail
        if tail and torn_tail:
            self._check_undo(self._tail, step)
        elif tail:
            self._check(self._tail, step, "the parameters")
        if tail or not torn_tail:  # else the tail is of new parameters, which were part of the rest, and has no sum
            self._check(self._tail + 1, _STATIC, "what no step changes")
        if position.phase in (Phase.VOTE, Phase.UPDATE):
            self._check(self._tail + 2, step, "the gradients")

    def _check_undo(self, unit: int, version: int) -> None:
        size = sum(place.size for place in self._units[unit])
        assert self._undo is not None
        if self._row(unit, version) != (version, self._checksum(self._undo.address, size, 0)):
            raise StateError(f"the copy of chunk {unit} from before step {version} does not match its checksum")

    def _check(self, unit: int, version: int, what: str) -> None:
        if self._row(unit, version) != (version, self._sum(unit)):
            raise StateError(f"{what} at step {version} does not match its checksum")

    # ----

    def _at(self, unit: int, version: int) -> int:
        return (2 * unit + version % 2) * _ROW.size

    def _row(self, unit: int, version: int) -> tuple[int, int]:
        found, crc = _ROW.unpack_from(self._rows, self._at(unit, version))
        return found, crc

    def _note(self, unit: int, version: int) -> None:
        _ROW.pack_into(self._rows, self._at(unit, version), version, self._sum(unit))

    def _sum(self, unit: int) -> int:
        crc = 0
        for place in self._units[unit]:
            crc = self._checksum(self._arenas[place.segment].address + place.offset, place.size, crc)
        return crc
