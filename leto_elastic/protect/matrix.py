"""The matrices of the code: k data pieces, m parity pieces, any k of the k + m give back the others.

Pieces are numbered 0..k-1 (data) and k..k+m-1 (parity). Piece i is the sum over j of matrix[i, j] times data piece j:
the first k rows are the identity, the rest is what ISA-L's `gf_gen_cauchy1_matrix` makes, 1 / (i ^ j). Every square
part of a Cauchy matrix can be inverted, so every loss of m pieces can be repaired. All nodes of a job must use the same
matrix, whatever engine each of them multiplies with.

One exception: with one parity piece (m = 1) its row is all ones, which makes it a plain XOR; and with one data piece
(k = 1) every row is 1, which makes the parity pieces plain copies. Both are as good codes, and much cheaper. A
Vandermonde matrix was rejected: ISA-L's own is not invertible for every loss.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leto_elastic.protect.field import INVERSES, PRODUCTS, Matrix, multiply

MAX_PIECES = 255


@dataclass(frozen=True, slots=True)
class Code:
    """A Reed-Solomon code RS(data, parity). Raises ValueError when it cannot exist.

    Attributes:
        data: data pieces of a stripe, k.
        parity: parity pieces of a stripe, m: as many lost pieces can be repaired.
    """

    data: int
    parity: int

    def __post_init__(self) -> None:
        _check(self.data, self.parity)

    @property
    def pieces(self) -> int:
        """Pieces of a stripe, k + m."""
        return self.data + self.parity

    @property
    def matrix(self) -> Matrix:
        """All rows, (k + m, k) uint8, read-only."""
        return cauchy(self.data, self.parity)

    @property
    def parity_rows(self) -> Matrix:
        """The rows of the parity pieces, (m, k) uint8, read-only."""
        return self.matrix[self.data :]

    def column(self, piece: int) -> Matrix:
        """What data piece `piece` adds to each parity piece, (m,) uint8. Raises ValueError when it is no data piece."""
        if not 0 <= piece < self.data:
            raise ValueError(f"piece {piece} is not one of the {self.data} data pieces")
        return self.parity_rows[:, piece]


@functools.cache
def cauchy(data: int, parity: int) -> Matrix:
    """The matrix of RS(data, parity), (data + parity, data) uint8, read-only; see the module for what is in it.

    Raises:
        ValueError: data < 1, parity < 1 or data + parity > 255.
    """
    _check(data, parity)
    matrix: Matrix = np.eye(data + parity, data, dtype=np.uint8)
    if data == 1 or parity == 1:
        matrix[data:] = 1
    else:
        rows, columns = np.arange(data, data + parity), np.arange(data)
        matrix[data:] = INVERSES[rows[:, None] ^ columns[None, :]]
    matrix.flags.writeable = False
    return matrix


def invert(matrix: Matrix) -> Matrix:
    """The inverse of an (n, n) uint8 matrix (Gauss-Jordan).

    Raises:
        ValueError: the matrix is not square or has no inverse.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"a matrix of shape {matrix.shape} is not square and has no inverse")
    size = matrix.shape[0]
    work = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        candidates = np.flatnonzero(work[column:, column])
        if not candidates.size:
            raise ValueError(f"the {size} x {size} matrix has no inverse: column {column} depends on those before it")
        pivot = column + int(candidates[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = PRODUCTS[INVERSES[work[column, column]], work[column]]
        factors = work[:, column].copy()
        factors[column] = 0
        work ^= PRODUCTS[factors[:, None], work[column][None, :]]
    inverse: Matrix = work[:, size:].copy()
    return inverse


def decode_rows(matrix: Matrix, have: Sequence[int], want: Sequence[int]) -> Matrix:
    """How the wanted pieces follow from the pieces that are there.

    Args:
        matrix: the code's matrix, (k + m, k) uint8.
        have: numbers of exactly k pieces, data or parity, in the order in which they will be given.
        want: numbers of the wanted pieces, data or parity.

    Returns:
        (len(want), k) uint8: wanted piece i is the sum over j of the result's [i, j] times piece have[j].

    Raises:
        ValueError: too few or too many pieces, one named twice, or one that does not exist.
    """
    pieces, data = matrix.shape
    if len(set(have)) != len(have):
        raise ValueError(f"a piece is named twice: have {list(have)}")
    if len(have) != data:
        few = "too few" if len(have) < data else "too many"
        raise ValueError(f"{few} pieces: have {len(have)} ({list(have)}), decoding takes exactly {data}")
    strangers = [piece for piece in (*have, *want) if not 0 <= piece < pieces]
    if strangers:
        raise ValueError(f"pieces {strangers} do not exist: the code has 0 to {pieces - 1}")
    return multiply(matrix[list(want)], invert(matrix[list(have)]))


def _check(data: int, parity: int) -> None:
    if data < 1 or parity < 1 or data + parity > MAX_PIECES:
        raise ValueError(
            f"no code with {data} data and {parity} parity pieces: each must be at least 1, "
            f"together at most {MAX_PIECES}"
        )
