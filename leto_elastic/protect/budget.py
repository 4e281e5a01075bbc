"""How many bytes a keeper may hold for others, and which of two protected versions is the later one."""

from __future__ import annotations

import threading

from leto_elastic.protect.world import Refusal
from leto_elastic.state.header import NO_TAG, generation_of, version_of

_MIB = 1 << 20


class Budget:
    """Bytes that are held. Thread-safe.

    Args:
        limit: bytes that may be held; None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.held = 0
        self._lock = threading.Lock()

    def take(self, size: int, what: str, instead: int = 0) -> None:
        """Hold `size` bytes, `instead` of others. Raises Refusal, with the numbers, when that would be too much."""
        with self._lock:
            if self.limit is not None and self.held - instead + size > self.limit:
                raise Refusal(
                    f"{what} needs {size / _MIB:.1f} MiB; this keeper holds {self.held / _MIB:.1f} MiB and may hold "
                    f"{self.limit / _MIB:.1f}"
                )
            self.held += size - instead

    def give(self, size: int) -> None:
        """They are free again."""
        with self._lock:
            self.held -= size


def age(tag: int) -> tuple[int, int]:
    """Tags ordered by when they were protected: a new generation may begin with an older version."""
    return (-1, -1) if tag == NO_TAG else (generation_of(tag), version_of(tag))


def later(one: int, other: int) -> int:
    """The tag that was protected later."""
    return max(one, other, key=age)
