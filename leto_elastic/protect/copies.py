"""Small copies of ranks: records, manifests, X, and the sums of protected versions.

Of X the two newest commits are kept, in the order in which they came: a rank that went back to an earlier version
replaces what it had sent of later ones. What belongs to a protected version is kept for the agreed one and the newest.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from leto_elastic.protect.budget import Budget, age, later
from leto_elastic.protect.messages import Kind
from leto_elastic.state.header import NO_TAG, version_of


class Key(NamedTuple):
    """Which copy of a rank. `tag` is `NO_TAG` unless it belongs to a protected version."""

    kind: Kind
    version: int
    tag: int = NO_TAG


@dataclass
class _Rank:
    """The copies of one rank, in the order in which they came."""

    agreed: int = NO_TAG
    copies: dict[Key, bytes] = field(default_factory=dict)


class Copies:
    """The copies of all ranks. Thread-safe.

    Args:
        budget: what they may take.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._ranks: dict[int, _Rank] = {}
        self._lock = threading.Lock()

    def put(self, rank: int, key: Key, data: bytes, agreed: int = NO_TAG) -> None:
        """Keep a copy. Raises Refusal when the budget does not allow it; then all is as before."""
        with self._lock:
            kept = self._ranks.setdefault(rank, _Rank())
            old = len(kept.copies.get(key, b""))
            self._budget.take(len(data), f"the {key.kind} of rank {rank}", instead=old)
            kept.agreed = later(kept.agreed, agreed)
            kept.copies.pop(key, None)
            kept.copies[key] = data
            gone = [other for other in kept.copies if not _worth(other, key, kept)]
            self._budget.give(sum(len(kept.copies.pop(other)) for other in gone))

    def get(self, rank: int, key: Key) -> bytes | None:
        """A copy; X is found by its version alone too, among those of protected versions as well."""
        with self._lock:
            kept = self._ranks.get(rank, _Rank()).copies
            if key in kept:
                return kept[key]
            if key.kind == "extras" and key.tag == NO_TAG:
                tags = [other.tag for other in kept if other.kind == "extras" and other.version == key.version]
                if tags:
                    return kept[Key("extras", key.version, max(tags, key=age))]
            if key.kind in ("record", "manifest"):  # there is one of them
                return next((data for other, data in kept.items() if other.kind == key.kind), None)
            return None

    def of(self, rank: int) -> list[tuple[Key, bytes, int]]:
        """All copies of a rank, in the order in which they came, with the agreed tag."""
        with self._lock:
            kept = self._ranks.get(rank, _Rank())
            return [(key, data, kept.agreed) for key, data in kept.copies.items()]

    def keys(self) -> list[tuple[int, Key]]:
        """All that is kept: rank and key."""
        with self._lock:
            return [(rank, key) for rank, kept in self._ranks.items() for key in kept.copies]

    def ranks(self) -> list[int]:
        """The ranks of which something is kept."""
        with self._lock:
            return sorted(self._ranks)


def _worth(key: Key, latest: Key, kept: _Rank) -> bool:
    """Whether a copy is kept now that `latest` has come."""
    if key == latest and key.tag == NO_TAG:
        return True
    if key.tag != NO_TAG:
        newest = max((other.tag for other in kept.copies), key=age)
        return key.tag in (kept.agreed, newest)
    if latest.tag != NO_TAG or key.kind != latest.kind:
        return True
    if key.kind != "extras":
        return False
    recent = [other for other in kept.copies if other.kind == "extras" and other.tag == NO_TAG]
    return key.version < latest.version and key in recent[-2:]


def protected(keys: list[tuple[int, Key]]) -> list[tuple[int, int]]:
    """(rank, tag) of which both X and the sums are there."""
    found = {(rank, key.tag, key.kind) for rank, key in keys if key.tag != NO_TAG}
    return sorted((rank, tag) for rank, tag, kind in found if kind == "sums" and (rank, tag, "extras") in found)


def versions(keys: list[tuple[int, Key]]) -> list[tuple[int, int]]:
    """(rank, version) of the copies of X."""
    return sorted(
        {
            (rank, version_of(key.tag) if key.tag != NO_TAG else key.version)
            for rank, key in keys
            if key.kind == "extras"
        }
    )
