"""The header of a trainer: where it is, readable by its agent at any instant, also after its death.

One 4096-byte segment. Everything that must change together is packed into one aligned 64-bit word, so that a reader
sees either the old or the new position and a SIGKILL can tear nothing:

    bits 63..24  step        step being run (COMPUTE, VOTE, UPDATE) or whose sections run (SECTION)
    bits 23..20  phase       see `Phase`
    bits 19..18  slot        which of the buffers of X is the committed one, X(step)
    bit  17      torn        the pre-image of chunk `chunk` is whole and the chunk may be half updated
    bits 16..0   chunk       UPDATE: chunks done; SECTION: index of the section being run

Beside it are words of the protection against lost memory, each a *tag* (`tag_of`) or -1 for none:

    sent       newest version of this slot that is whole at its keepers; written by the agent
    agreed     newest version that every rank had sent when a vote passed: the protected version; by the trainer
    buffers    the version that each of the two snapshot buffers holds whole; by the trainer
    target     the version whose pre-images the running update keeps, and in which buffer; by the trainer
"""

from __future__ import annotations

import ctypes
import enum
import mmap
from typing import NamedTuple

HEADER_BYTES = 4096
MAGIC = 0x4C45544F48445231  # "LETOHDR1"

_MAX_CHUNK = (1 << 17) - 1
_MAX_STEP = (1 << 39) - 1


class Phase(enum.IntEnum):
    """Phases of a step on one rank, in order."""

    SETUP = 0
    SECTION = 1
    COMPUTE = 2
    VOTE = 3
    UPDATE = 4
    DONE = 5


class Position(NamedTuple):
    """Where a trainer is: the decoded word of its header."""

    step: int
    phase: Phase
    slot: int = 0
    torn: bool = False
    chunk: int = 0

    def pack(self) -> int:
        """The word. Raises ValueError when a field is out of range."""
        if not (0 <= self.step <= _MAX_STEP and 0 <= self.slot < 4 and 0 <= self.chunk <= _MAX_CHUNK):
            raise ValueError(f"position out of range: {self}")
        return self.step << 24 | int(self.phase) << 20 | self.slot << 18 | int(self.torn) << 17 | self.chunk

    @classmethod
    def unpack(cls, word: int) -> Position:
        """The position of a word. Raises ValueError for a phase that does not exist."""
        return cls(
            step=word >> 24,
            phase=Phase(word >> 20 & 0xF),
            slot=word >> 18 & 0x3,
            torn=bool(word >> 17 & 1),
            chunk=word & _MAX_CHUNK,
        )


NO_TAG = -1
_GENERATION_BITS = 24


def tag_of(version: int, generation: int) -> int:
    """The number of a protected version: tags compare by version first.

    `generation`: the epoch of the last plan that lost memory or moved a rank; a version protected again is a new one.
    """
    return version << _GENERATION_BITS | generation


def version_of(tag: int) -> int:
    """The version of a tag, the step at whose start the state is meant; -1 for none."""
    return tag >> _GENERATION_BITS


def generation_of(tag: int) -> int:
    """The generation of a tag."""
    return tag & ((1 << _GENERATION_BITS) - 1)


class _Layout(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_int64),
        ("word", ctypes.c_int64),
        ("epoch", ctypes.c_int64),
        ("last_words", ctypes.c_double),
        ("sent", ctypes.c_int64),
        ("agreed", ctypes.c_int64),
        ("buffers", ctypes.c_int64 * 2),
        ("target", ctypes.c_int64),
        ("target_buffer", ctypes.c_int64),
    ]


class Header:
    """A view of a header segment; the trainer writes, anyone who maps the segment reads.

    Args:
        fd: descriptor of the segment; may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, HEADER_BYTES)
        self._view = _Layout.from_buffer(self._map)

    def initialise(self) -> None:
        """Called once by the first trainer of a slot."""
        view = self._view
        view.word = Position(0, Phase.SETUP).pack()
        view.sent = view.agreed = view.target = view.buffers[0] = view.buffers[1] = NO_TAG
        view.magic = MAGIC

    @property
    def valid(self) -> bool:
        return bool(self._view.magic == MAGIC)

    @property
    def position(self) -> Position:
        return Position.unpack(self._view.word)

    @position.setter
    def position(self, value: Position) -> None:
        self._view.word = value.pack()

    @property
    def epoch(self) -> int:
        return int(self._view.epoch)

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._view.epoch = value

    @property
    def last_words(self) -> float:
        """Monotonic seconds at which an injected fault ended the process; 0.0 for none."""
        return float(self._view.last_words)

    @last_words.setter
    def last_words(self, value: float) -> None:
        self._view.last_words = value

    @property
    def sent(self) -> int:
        return int(self._view.sent)

    @sent.setter
    def sent(self, tag: int) -> None:
        self._view.sent = tag

    @property
    def agreed(self) -> int:
        return int(self._view.agreed)

    @agreed.setter
    def agreed(self, tag: int) -> None:
        self._view.agreed = tag

    @property
    def buffers(self) -> tuple[int, int]:
        return int(self._view.buffers[0]), int(self._view.buffers[1])

    def set_buffer(self, index: int, tag: int) -> None:
        """Note what snapshot buffer `index` holds whole (-1: nothing)."""
        self._view.buffers[index] = tag

    @property
    def target(self) -> tuple[int, int]:
        """(tag, index of the buffer); the tag is -1 when the update keeps no snapshot."""
        return int(self._view.target), int(self._view.target_buffer)

    @target.setter
    def target(self, value: tuple[int, int]) -> None:
        self._view.target_buffer = value[1]
        self._view.target = value[0]

    def close(self) -> None:
        """Unmap. The header must not be used afterwards."""
        del self._view
        self._map.close()
