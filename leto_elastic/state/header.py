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

And `layout`: the version of the newest manifest that the trainer has sent before it wrote by it.
And words by which an agent tells whether the trainer is alive (see `worker.heartbeat`), all written by the trainer:

    beat       when Python code last ran in it, monotonic seconds; 0.0 before its first step
    paused     until when it may stand still, monotonic seconds; 0.0: it may not
    waiting    key (`key_of`) of the group with a collective that it has entered and that is not over; 0 for none
    thread     id of the thread that beats
    groups     key, number of collectives entered in this epoch, and signature of the last one, for up to 32 groups
    others     collectives entered of all other groups, together
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import mmap
import struct
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


GROUPS = 32
"""Groups whose collectives are counted apart."""


def key_of(group: str) -> int:
    """A group's number, above 0, the same in every process."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest()) >> 1 | 1


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
        ("layout", ctypes.c_int64),
        ("beat", ctypes.c_double),
        ("paused", ctypes.c_double),
        ("waiting", ctypes.c_int64),
        ("thread", ctypes.c_int64),
        ("others", ctypes.c_int64),
        ("groups", ctypes.c_int64 * (3 * GROUPS)),
    ]


_WORD = _Layout.word.offset // 8
_POSITION = slice(_Layout.word.offset, _Layout.word.offset + 8)
_OTHERS = _Layout.others.offset // 8
_COUNTS = _Layout.groups.offset // 8 + 1
_SIGNS = struct.Struct("dd")
_CALLS = slice(_Layout.others.offset, ctypes.sizeof(_Layout))


class Signs(NamedTuple):
    """Of a trainer at an instant.

    Args:
        step: that it stands at.
        progress: changes whenever it gets on.
        beat, paused: see above.
    """

    step: int
    progress: bytes
    beat: float
    paused: float


class Header:
    """A view of a header segment; the trainer writes, anyone who maps the segment reads.

    Args:
        fd: descriptor of the segment; may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, HEADER_BYTES)
        self._view = _Layout.from_buffer(self._map)
        self._words = memoryview(self._map).cast("q")  # for what is counted often

    def initialise(self) -> None:
        """Called once by the first trainer of a slot."""
        view = self._view
        view.word = Position(0, Phase.SETUP).pack()
        view.sent = view.agreed = view.target = view.buffers[0] = view.buffers[1] = NO_TAG
        self.forget()
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

    @property
    def layout(self) -> int:
        return int(self._view.layout)

    @layout.setter
    def layout(self, version: int) -> None:
        self._view.layout = version

    # ---- whether the trainer is alive

    @property
    def beat(self) -> float:
        return float(self._view.beat)

    @beat.setter
    def beat(self, now: float) -> None:
        self._view.beat = now

    @property
    def paused(self) -> float:
        return float(self._view.paused)

    @paused.setter
    def paused(self, until: float) -> None:
        self._view.paused = until

    @property
    def waiting(self) -> int:
        return int(self._view.waiting)

    @waiting.setter
    def waiting(self, key: int) -> None:
        self._view.waiting = key

    @property
    def thread(self) -> int:
        return int(self._view.thread)

    @thread.setter
    def thread(self, ident: int) -> None:
        self._view.thread = ident

    @property
    def signs(self) -> Signs:
        """Signs of life, read often."""
        beat, paused = _SIGNS.unpack_from(self._map, _Layout.beat.offset)
        return Signs(self._words[_WORD] >> 24, self._map[_POSITION] + self._map[_CALLS], beat, paused)

    def forget(self) -> None:
        """What a process before this one, or the epoch before, has left of these words."""
        self._view.beat = self._view.paused = 0.0
        self._view.waiting = self._view.thread = 0
        self.forget_calls()

    def forget_calls(self) -> None:
        """Begin to count collectives: no group is known."""
        self._view.waiting = self._view.others = 0
        ctypes.memset(ctypes.addressof(self._view.groups), 0, ctypes.sizeof(self._view.groups))

    def set_group(self, index: int, key: int) -> None:
        """Count the collectives of a group in line `index` of the table, below `GROUPS`, from 0 on."""
        self._view.groups[3 * index + 1] = self._view.groups[3 * index + 2] = 0
        self._view.groups[3 * index] = key

    def entered(self, index: int, signature: int) -> None:
        """Another collective of the group in this line; -1: of a group that has none."""
        if index < 0:
            self._words[_OTHERS] += 1
            return
        line = _COUNTS + 3 * index
        self._words[line] += 1
        self._words[line + 1] = signature

    @property
    def groups(self) -> dict[int, tuple[int, int]]:
        """Collectives entered and signature of the last one, by key of the group."""
        words = list(self._view.groups)
        return {key: (calls, last) for key, calls, last in zip(*(words[i::3] for i in range(3)), strict=True) if key}

    def close(self) -> None:
        """Unmap. The header must not be used afterwards."""
        self._words.release()
        del self._view
        self._map.close()
