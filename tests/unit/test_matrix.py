"""The field and the matrices: against ISA-L's own, against reedsolo's field, and for every loss of small codes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_elastic.protect.field import INVERSES, POLYNOMIAL, PRODUCTS, Matrix, multiply
from leto_elastic.protect.library import bundled
from leto_elastic.protect.matrix import Code, cauchy, decode_rows, invert

SMALL = list(itertools.product(range(1, 9), range(1, 5)))


def test_the_field_is_that_of_reedsolo() -> None:
    reedsolo = pytest.importorskip("reedsolo")
    reedsolo.init_tables(0x11D)
    assert POLYNOMIAL == 0x11D
    theirs = [[reedsolo.gf_mul(a, b) for b in range(256)] for a in range(256)]
    assert (np.array(theirs, dtype=np.uint8) == PRODUCTS).all()
    assert [reedsolo.gf_inverse(a) for a in range(1, 256)] == INVERSES[1:].tolist()


def test_products_follow_the_polynomial() -> None:
    def product(a: int, b: int) -> int:
        result = 0
        while b:
            result ^= a if b & 1 else 0
            a = a << 1 ^ (0x11D if a & 0x80 else 0)
            b >>= 1
        return result

    assert all(PRODUCTS[a, b] == product(a, b) for a in range(256) for b in range(256))


def test_inverses() -> None:
    assert (PRODUCTS[np.arange(1, 256), INVERSES[1:]] == 1).all()
    assert INVERSES[0] == 0


@pytest.mark.parametrize("data", [*range(2, 33), 100, 200, 253])
def test_the_matrix_is_that_of_isal(data: int) -> None:
    make = ctypes.CDLL(str(bundled()[0])).gf_gen_cauchy1_matrix
    for parity in sorted({2, 3, 4, 8, 55} & set(range(256 - data))):
        theirs = np.zeros((data + parity, data), dtype=np.uint8)
        make(ctypes.c_void_p(theirs.ctypes.data), data + parity, data)
        assert (theirs == cauchy(data, parity)).all()


@pytest.mark.parametrize("count", [1, 2, 5, 254])
def test_one_parity_piece_is_a_sum_and_one_data_piece_is_copied(count: int) -> None:
    assert (cauchy(count, 1)[count:] == 1).all()
    assert (cauchy(1, count) == 1).all()


def test_a_matrix_is_made_once_and_cannot_be_changed() -> None:
    assert cauchy(4, 2) is cauchy(4, 2)
    assert not cauchy(4, 2).flags.writeable
    assert not PRODUCTS.flags.writeable


@pytest.mark.parametrize(("data", "parity"), SMALL)
def test_any_k_pieces_give_the_others(data: int, parity: int) -> None:
    code = Code(data, parity)
    payload = np.random.default_rng(data * 10 + parity).integers(0, 256, (data, 5), dtype=np.uint8)
    pieces = multiply(code.matrix, payload)
    assert (pieces[:data] == payload).all()
    for have in itertools.combinations(range(code.pieces), data):
        want = [piece for piece in range(code.pieces) if piece not in have]
        rows = decode_rows(code.matrix, have, want)
        assert rows.shape == (parity, data)
        assert (multiply(rows, pieces[list(have)]) == pieces[want]).all()


@given(st.data(), st.integers(1, 40), st.integers(1, 20))
def test_pieces_may_be_given_in_any_order(draw: st.DataObject, data: int, parity: int) -> None:
    code = Code(data, parity)
    have = draw.draw(st.permutations(range(code.pieces)))[:data]
    rows = decode_rows(code.matrix, have, range(code.pieces))
    assert (rows == multiply(code.matrix, invert(code.matrix[have]))).all()
    assert (rows[have] == np.eye(data, dtype=np.uint8)).all()


@given(st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_a_matrix_times_its_inverse_is_the_identity(size: int, seed: int) -> None:
    rows = np.random.default_rng(seed).permutation(255)[: 2 * size]
    matrix: Matrix = INVERSES[rows[:size, None] ^ rows[None, size:]]
    assert (multiply(matrix, invert(matrix)) == np.eye(size, dtype=np.uint8)).all()


def test_a_matrix_without_inverse_is_refused() -> None:
    with pytest.raises(ValueError, match="3 x 3 matrix has no inverse: column 2"):
        invert(np.array([[1, 2, 3], [4, 5, 1], [5, 7, 2]], dtype=np.uint8))
    with pytest.raises(ValueError, match=r"\(2, 3\) is not square"):
        invert(np.ones((2, 3), dtype=np.uint8))


@pytest.mark.parametrize(("data", "parity"), [(0, 1), (1, 0), (-1, 2), (3, -1), (250, 6), (1, 255)])
def test_a_code_that_cannot_exist_is_refused(data: int, parity: int) -> None:
    with pytest.raises(ValueError, match=f"no code with {data} data and {parity} parity pieces"):
        Code(data, parity)
    with pytest.raises(ValueError, match="together at most 255"):
        cauchy(data, parity)


@pytest.mark.parametrize(
    ("have", "want", "message"),
    [
        ([0, 1, 5], [2], "too few pieces: have 3"),
        ([0, 1, 2, 3, 4], [5], "too many pieces: have 5"),
        ([0, 1, 1, 4], [2], "named twice"),
        ([0, 1, 2, 6], [3], r"pieces \[6\] do not exist"),
        ([0, 1, 2, 3], [-1], r"pieces \[-1\] do not exist"),
    ],
)
def test_what_cannot_be_decoded_is_refused(have: Sequence[int], want: Sequence[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_rows(cauchy(4, 2), have, want)


def test_parts_of_a_code() -> None:
    code = Code(4, 2)
    assert code.pieces == 6
    assert (code.parity_rows == cauchy(4, 2)[4:]).all()
    assert (code.column(3) == cauchy(4, 2)[4:, 3]).all()
    for piece in (-1, 4):
        with pytest.raises(ValueError, match=f"piece {piece} is not one of the 4 data pieces"):
            code.column(piece)
