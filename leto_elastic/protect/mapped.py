"""The state of a local rank as the keeper sees it: its segments, mapped.

Mappings are never closed by hand. Whoever works with a slot holds a reference, and the last one to drop it unmaps.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from leto_elastic.errors import StateError
from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.checksum import checksum
from leto_elastic.protect.placement import unit_range
from leto_elastic.state.header import Header, Phase
from leto_elastic.state.layout import ALIGN, Manifest, Place

HEADER = "header"  # name of the segment that a trainer's header is in

_EXTRAS_PREFIX = struct.Struct("<QI4x")  # length and CRC-32, as `leto_elastic.state.extras` writes them
_UNCHANGED = (Phase.SECTION, Phase.COMPUTE, Phase.VOTE)  # phases of step s in which W is W(s)


class Stream:
    """Ranges of memory, one after the other, as one sequence of `size` bytes."""

    def __init__(self, ranges: Iterable[Bytes]) -> None:
        self._ranges = [part for part in ranges if part.size]
        self._starts = np.cumsum([0, *(part.size for part in self._ranges)]).tolist()
        self.size: int = self._starts[-1]

    def views(self, start: int, stop: int) -> list[Bytes]:
        """The bytes from start to stop, in place. Raises ValueError when they are not all inside."""
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"bytes {start} to {stop} of a stream of {self.size}")
        found = []
        for begin, part in zip(self._starts, self._ranges, strict=False):
            low, high = max(start, begin), min(stop, begin + part.size)
            if low < high:
                found.append(part[low - begin : high - begin])
        return found

    def read(self, start: int, into: Bytes) -> None:
        """Copy the bytes from `start` on into `into`, as many as it takes."""
        done = 0
        for view in self.views(start, start + into.size):
            np.copyto(into[done : done + view.size], view)
            done += view.size

    def write(self, start: int, data: Bytes) -> None:
        """Inverse of `read`."""
        done = 0
        for view in self.views(start, start + data.size):
            np.copyto(view, data[done : done + view.size])
            done += view.size

    def checksum(self, start: int, stop: int) -> int:
        """CRC-32 of the bytes from start to stop."""
        crc = 0
        for view in self.views(start, stop):
            crc = checksum(view, crc)
        return crc

    def sums(self, parts: int) -> list[int]:
        """CRC-32 of each part of the stream, cut into that many."""
        return [self.checksum(*unit_range(self.size, parts, part)) for part in range(parts)]


class Slot:
    """One local rank.

    Args:
        manifest: its layout.
        fds: descriptors of its segments, by name, the header's included; may be closed afterwards.

    Raises:
        StateError: a segment is missing, or shorter than the manifest says.
    """

    def __init__(self, manifest: Manifest, fds: Mapping[str, int]) -> None:
        self.manifest = manifest
        self._fds = fds
        self._maps: dict[str, Bytes] = {}
        self.header = Header(self._fd(HEADER))
        self.weights = Stream([self._range(place) for place in manifest.stream])
        self._extras = self._map(manifest.extras)
        self._buffers = [self._map(name) for name in manifest.snapshots]
        self._fds = {}
        behind = _aligned(self.weights.size)
        for name, buffer in zip(manifest.snapshots, self._buffers, strict=True):
            if buffer.size < behind + _EXTRAS_PREFIX.size:
                raise StateError(f"snapshot buffer {name!r} has {buffer.size} bytes, its stream alone needs {behind}")
        self.snapshots = [Stream([buffer[: self.weights.size]]) for buffer in self._buffers]

    def source(self, buffer: int) -> Stream:
        """W (-1), or a snapshot buffer. Raises StateError when there is no such buffer."""
        if buffer == -1:
            return self.weights
        if not 0 <= buffer < len(self.snapshots):
            raise StateError(f"there is no snapshot buffer {buffer}, only {len(self.snapshots)}")
        return self.snapshots[buffer]

    def holds(self, tag: int, version: int, buffer: int) -> bool:
        """Whether the source is still what it was: the buffer holds the tag, or W has not been changed since."""
        if buffer >= 0:
            return self.header.buffers[buffer] == tag
        position = self.header.position
        return position.step == version and position.phase in _UNCHANGED

    def extras(self, buffer: int, slot: int) -> bytes:
        """X that belongs to `source(buffer)`; for W, `slot` is that of the extras. Raises StateError when damaged."""
        if buffer == -1:
            capacity = self.manifest.extras_capacity
            area = self._extras[slot * capacity : (slot + 1) * capacity]
        else:
            area = self._buffers[buffer][_aligned(self.weights.size) :]
        if area.size < _EXTRAS_PREFIX.size:
            raise StateError(f"there is no slot {slot} of the extras")
        size, crc = _EXTRAS_PREFIX.unpack(area[: _EXTRAS_PREFIX.size].tobytes())
        data = area[_EXTRAS_PREFIX.size :][:size].tobytes()
        if len(data) != size or zlib.crc32(data) != crc:
            raise StateError("the extras do not match their checksum")
        return data

    def write_extras(self, buffer: int, slot: int, data: bytes) -> None:
        """Inverse of `extras`. Raises StateError when the data does not fit."""
        area = self._extras_area(buffer, slot)
        if area.size < _EXTRAS_PREFIX.size + len(data):
            raise StateError(f"{len(data)} bytes of extras do not fit into {area.size}")
        whole = _EXTRAS_PREFIX.pack(len(data), zlib.crc32(data)) + data
        area[: len(whole)] = np.frombuffer(whole, dtype=np.uint8)

    def _extras_area(self, buffer: int, slot: int) -> Bytes:
        if buffer == -1:
            capacity = self.manifest.extras_capacity
            return self._extras[slot * capacity : (slot + 1) * capacity]
        return self._buffers[buffer][_aligned(self.weights.size) :]

    def _fd(self, name: str) -> int:
        if name not in self._fds:
            raise StateError(f"segment {name!r} is missing; there are {sorted(self._fds)}")
        return self._fds[name]

    def _map(self, name: str) -> Bytes:
        if name not in self._maps:
            fd = self._fd(name)
            self._maps[name] = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=np.uint8)
        return self._maps[name]

    def _range(self, place: Place) -> Bytes:
        segment = self._map(place.segment)
        if not 0 <= place.offset <= place.offset + place.size <= segment.size:
            raise StateError(f"{place} lies outside of its segment of {segment.size} bytes")
        return segment[place.offset : place.offset + place.size]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
