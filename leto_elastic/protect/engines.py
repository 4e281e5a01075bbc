"""What multiplies: one contract, three engines, all with the same field and so the same bytes.

| name | what | data per second, k=8, m=2 |
|---|---|---|
| isal | ISA-L, the system's or the one in pyeclib's wheel | 6 to 20 GB |
| tables | numpy, when there is no ISA-L | 0.5 GB |
| reedsolo | pure Python, for checks | 2.5 MB |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from leto_elastic.errors import ConfigError
from leto_elastic.protect.buffers import BytesLike
from leto_elastic.protect.field import Matrix
from leto_elastic.protect.isal import IsalEngine
from leto_elastic.protect.library import find
from leto_elastic.protect.reference import ReedsoloEngine
from leto_elastic.protect.tables import TablesEngine

NAMES = ("auto", "isal", "tables", "reedsolo")


class Engine(Protocol):
    """Sums of products over GF(2^8), on buffers in place.

    All buffers of a call have one length in bytes, any length and any address; length 0 does nothing. A target must
    overlap no other buffer of the call. Both methods may be called from several threads. They raise ValueError for
    coefficients of another shape than the buffers ask for, for different lengths and for a read-only target.
    """

    @property
    def name(self) -> str:
        """What `open_engine` knows it by."""

    def dot(self, coefficients: Matrix, sources: Sequence[BytesLike], targets: Sequence[BytesLike]) -> None:
        """targets[i] = sum over j of coefficients[i, j] * sources[j].

        Args:
            coefficients: (len(targets), len(sources)) uint8.
            sources: at least one buffer; only read.
            targets: buffers; what is in them is overwritten.
        """

    def update(self, column: Matrix, source: BytesLike, targets: Sequence[BytesLike]) -> None:
        """targets[i] = targets[i] + column[i] * source.

        So parity grows as pieces arrive, in any order, and follows a change: update with the old bytes, then with the
        new ones, or once with their XOR.

        Args:
            column: (len(targets),) uint8.
            source: only read.
            targets: buffers to add to.
        """


def open_engine(name: str = "auto") -> Engine:
    """An engine by name; "auto" is ISA-L where it is found, else the tables.

    Raises:
        ValueError: there is no such name.
        ConfigError: the engine of that name is not installed; says how to get it.
    """
    if name not in NAMES:
        raise ValueError(f"no coding engine {name!r}: it must be one of {', '.join(NAMES)}")
    if name == "reedsolo":
        return ReedsoloEngine()
    library = find() if name in ("auto", "isal") else None
    if library is not None:
        return IsalEngine(library)
    if name == "isal":
        raise ConfigError("ISA-L was not found: install libisal2 (Debian, Ubuntu) or pyeclib (pip install pyeclib)")
    return TablesEngine()
