"""Stripes: parity from data, and lost pieces from those that are left.

The buffers are the caller's, and nothing is copied. How pieces are placed, padded or sent is not decided here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from leto_elastic.protect.buffers import BytesLike
from leto_elastic.protect.engines import Engine, open_engine
from leto_elastic.protect.field import Matrix
from leto_elastic.protect.matrix import Code, decode_rows

__all__ = ["Engine", "decode", "encode", "open_engine"]


def encode(engine: Engine, code: Code, sources: Sequence[BytesLike], targets: Sequence[BytesLike]) -> None:
    """Compute all parity pieces of a stripe.

    Args:
        engine: what multiplies.
        code: RS(k, m).
        sources: the k data pieces.
        targets: the m parity pieces, overwritten. All buffers have one length in bytes.

    Raises:
        ValueError: another number of buffers than the code's, different lengths, a read-only target.
    """
    if (len(sources), len(targets)) != (code.data, code.parity):
        raise ValueError(
            f"RS({code.data}, {code.parity}) takes {code.data} sources and {code.parity} targets, "
            f"got {len(sources)} and {len(targets)}"
        )
    engine.dot(code.parity_rows, sources, targets)


def decode(engine: Engine, code: Code, have: Mapping[int, BytesLike], want: Mapping[int, BytesLike]) -> None:
    """Compute lost pieces of a stripe, data or parity.

    Args:
        engine: what multiplies.
        code: RS(k, m).
        have: pieces by number, at least k; of more, those with the lowest numbers are used.
        want: the buffers of the wanted pieces, by number, overwritten. All buffers have one length in bytes.

    Raises:
        ValueError: fewer than k pieces, a number that does not exist, a piece both given and wanted, different
            lengths, a read-only target.
    """
    both = sorted(have.keys() & want.keys())
    if both:
        raise ValueError(f"pieces {both} are both given and wanted")
    if len(have) < code.data:
        raise ValueError(
            f"too few pieces: RS({code.data}, {code.parity}) needs {code.data}, have {len(have)} ({sorted(have)})"
        )
    used = tuple(sorted(have)[: code.data])
    engine.dot(_rows(code, used, tuple(want)), [have[piece] for piece in used], list(want.values()))


@functools.lru_cache(maxsize=512)
def _rows(code: Code, have: tuple[int, ...], want: tuple[int, ...]) -> Matrix:
    """The same few losses are decoded for every chunk."""
    return decode_rows(code.matrix, have, want)
