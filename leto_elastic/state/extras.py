"""The extras X of a trainer: three buffers in one segment, of which the header names the committed one.

Slot c holds X(s), the world at the start of the step s that the header names. Slot c+1 (mod 3) takes what is known at
the vote: X(s+1) but for what the commit itself changes; a shadow that rolls a step forward starts from it. Slot c+2
takes X(s+1) at the commit, and the header's next word makes it the committed one. So no write ever touches bytes that a
reader may need. Each buffer is a length, a CRC-32 and the packed state.
"""

from __future__ import annotations

import struct
import zlib

from leto_elastic.errors import StateError
from leto_elastic.state.arena import Arena, aligned

SLOTS = 3
_PREFIX = struct.Struct("<QI4x")


def capacity_for(size: int) -> int:
    """Bytes to reserve for one buffer when its first content has `size` bytes."""
    return aligned(max(1 << 16, 2 * size + _PREFIX.size))


class Extras:
    """The three buffers.

    Args:
        arena: a segment of at least `SLOTS * capacity` bytes.
        capacity: bytes of one buffer.
    """

    def __init__(self, arena: Arena, capacity: int) -> None:
        self.capacity = capacity
        self._bytes = arena.bytes(0, SLOTS * capacity)

    def fits(self, data: bytes) -> bool:
        return len(data) + _PREFIX.size <= self.capacity

    def write(self, slot: int, data: bytes) -> None:
        """Fill a buffer that the header does not name. Raises StateError when the data does not fit."""
        if not self.fits(data):
            raise StateError(f"{len(data)} bytes of extras do not fit into {self.capacity}")
        start = slot % SLOTS * self.capacity
        body = start + _PREFIX.size
        self._bytes[body : body + len(data)] = data
        _PREFIX.pack_into(self._bytes, start, len(data), zlib.crc32(data))

    def read(self, slot: int) -> bytes:
        """A buffer's content. Raises StateError when its checksum does not match."""
        start = slot % SLOTS * self.capacity
        size, checksum = _PREFIX.unpack_from(self._bytes, start)
        if size + _PREFIX.size > self.capacity:
            raise StateError(f"extras in slot {slot % SLOTS} claim {size} bytes, more than the buffer holds")
        data = bytes(self._bytes[start + _PREFIX.size : start + _PREFIX.size + size])
        if zlib.crc32(data) != checksum:
            raise StateError(f"extras in slot {slot % SLOTS} do not match their checksum")
        return data

    def copy_slot(self, slot: int, target: Arena, offset: int) -> None:
        """Copy what a buffer holds, prefix included, to `offset` bytes of another segment."""
        start = slot % SLOTS * self.capacity
        size = _PREFIX.size + _PREFIX.unpack_from(self._bytes, start)[0]
        target.bytes(offset, size)[:] = self._bytes[start : start + size]

    def copy_to(self, other: Extras) -> None:
        """Copy all buffers, slot by slot, into larger ones."""
        for slot in range(SLOTS):
            source, target = slot * self.capacity, slot * other.capacity
            other._bytes[target : target + self.capacity] = self._bytes[source : source + self.capacity]
