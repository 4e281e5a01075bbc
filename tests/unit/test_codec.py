"""Every engine: the same bytes as the matrix says, for any length and address, and not one byte beside them."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_elastic.errors import ConfigError
from leto_elastic.protect import isal, library, tables
from leto_elastic.protect.buffers import Bytes, BytesLike, flat, memory_at
from leto_elastic.protect.codec import decode, encode
from leto_elastic.protect.engines import Engine, open_engine
from leto_elastic.protect.field import Matrix, multiply
from leto_elastic.protect.matrix import Code

GUARD = 0xA5
SEEDS = st.integers(0, 2**32 - 1)
CODES = st.one_of(
    st.builds(Code, st.integers(1, 12), st.integers(1, 9)), st.builds(Code, st.integers(1, 12), st.just(1))
)


@pytest.fixture(scope="module", params=["isal", "tables", "reedsolo"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "reedsolo":
        pytest.importorskip("reedsolo")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the engine 'reedsolo' is for checks", RuntimeWarning)
        return open_engine(request.param)


class Place:
    """A buffer of `length` bytes at any address, with bytes around it that nobody may write."""

    def __init__(self, length: int, offset: int, content: Bytes | None = None) -> None:
        self.memory = np.full(length + offset + 200, GUARD, dtype=np.uint8)
        start = -self.memory.ctypes.data % 64 + 64 + offset
        self.bytes = self.memory[start : start + length]
        self.around = [self.memory[:start], self.memory[start + length :]]
        if content is not None:
            self.bytes[:] = content

    def check(self, expected: Bytes) -> None:
        assert (self.bytes == expected).all()
        assert all((part == GUARD).all() for part in self.around)


def stripe(code: Code, length: int, seed: int) -> Bytes:
    """All pieces as the matrix has them, (k + m, length)."""
    payload = np.random.default_rng(seed).integers(0, 256, (code.data, length), dtype=np.uint8)
    return multiply(code.matrix, payload)


def offsets(seed: int, count: int, *, aligned: bool) -> list[int]:
    return [0] * count if aligned else np.random.default_rng(seed).integers(0, 64, count).tolist()


def limit(engine: Engine, length: int) -> int:
    """Fewer bytes for the engine that takes a microsecond for each."""
    return length % 8 if engine.name == "reedsolo" else length


def check_parity(engine: Engine, code: Code, length: int, seed: int, *, aligned: bool) -> None:
    pieces = stripe(code, length, seed)
    places = [
        Place(length, offset, piece)
        for offset, piece in zip(offsets(seed, code.pieces, aligned=aligned), pieces, strict=True)
    ]
    for place in places[code.data :]:
        place.bytes[:] = 0x77
    encode(engine, code, [p.bytes for p in places[: code.data]], [p.bytes for p in places[code.data :]])
    for place, piece in zip(places, pieces, strict=True):
        place.check(piece)


@given(CODES, st.integers(0, 700), SEEDS, st.booleans())
def test_parity_is_what_the_matrix_says(engine: Engine, code: Code, length: int, seed: int, aligned: bool) -> None:
    check_parity(engine, code, limit(engine, length), seed, aligned=aligned)


def test_parity_by_reedsolo_alone() -> None:
    reedsolo = pytest.importorskip("reedsolo")
    code, length = Code(5, 3), 50
    pieces = stripe(code, length, 7)
    parity = np.zeros((3, length), dtype=np.uint8)
    encode(open_engine("isal"), code, list(pieces[:5]), list(parity))
    reedsolo.init_tables(0x11D)
    for row in range(3):
        for at in range(length):
            total = 0
            for column in range(5):
                coefficient = reedsolo.gf_inverse((5 + row) ^ column)
                total ^= reedsolo.gf_mul(coefficient, int(pieces[column, at]))
            assert parity[row, at] == total


@pytest.mark.parametrize("data", range(1, 9))
@pytest.mark.parametrize("parity", range(1, 5))
def test_every_loss_of_small_codes_is_repaired(engine: Engine, data: int, parity: int) -> None:
    code = Code(data, parity)
    pieces = stripe(code, limit(engine, 97 + data + 13 * parity), data * 10 + parity)
    for have in itertools.combinations(range(code.pieces), data):
        lost = {piece: np.full_like(pieces[0], 0x77) for piece in range(code.pieces) if piece not in have}
        decode(engine, code, {piece: pieces[piece] for piece in have}, lost)
        for piece, found in lost.items():
            assert (found == pieces[piece]).all(), (have, piece)


@given(st.data(), CODES, st.integers(0, 300), SEEDS)
def test_any_pieces_give_any_others(engine: Engine, draw: st.DataObject, code: Code, length: int, seed: int) -> None:
    length = limit(engine, length)
    pieces = stripe(code, length, seed)
    order = draw.draw(st.permutations(range(code.pieces)))
    count = draw.draw(st.integers(code.data, code.pieces))
    have, lost = order[:count], order[count:]
    want = {piece: Place(length, seed % 61) for piece in lost[: draw.draw(st.integers(0, len(lost)))]}
    decode(engine, code, {piece: pieces[piece] for piece in have}, {n: place.bytes for n, place in want.items()})
    for piece, place in want.items():
        place.check(pieces[piece])


@given(st.data(), CODES, st.integers(0, 300), SEEDS, st.booleans())
def test_parity_grows_in_any_order(
    engine: Engine, draw: st.DataObject, code: Code, length: int, seed: int, aligned: bool
) -> None:
    length = limit(engine, length)
    pieces = stripe(code, length, seed)
    at = offsets(seed, code.pieces, aligned=aligned)
    targets = [Place(length, offset, np.zeros(length, dtype=np.uint8)) for offset in at[code.data :]]
    for piece in draw.draw(st.permutations(range(code.data))):
        source = Place(length, at[piece], pieces[piece])
        engine.update(code.column(piece), source.bytes, [target.bytes for target in targets])
        source.check(pieces[piece])
    for target, expected in zip(targets, pieces[code.data :], strict=True):
        target.check(expected)


@given(CODES, st.integers(0, 300), SEEDS, st.booleans())
def test_parity_follows_a_change(engine: Engine, code: Code, length: int, seed: int, fused: bool) -> None:
    length = limit(engine, length)
    before, after = stripe(code, length, seed), stripe(code, length, seed ^ 1)
    changed = seed % code.data
    after[: code.data] = np.where(np.arange(code.data)[:, None] == changed, after[: code.data], before[: code.data])
    after[code.data :] = multiply(code.parity_rows, after[: code.data])
    parity = list(before[code.data :].copy())
    old, new = before[changed], after[changed]
    for source in [old ^ new] if fused else [old, new]:
        engine.update(code.column(changed), source, parity)
    assert (np.array(parity) == after[code.data :]).all()


def test_one_keeper_has_one_row(engine: Engine) -> None:
    code = Code(4, 3)
    pieces = stripe(code, 9, 1)
    mine = np.zeros(9, dtype=np.uint8)
    for piece in range(4):
        engine.update(code.column(piece)[1:2], pieces[piece], [mine])
    assert (mine == pieces[5]).all()


@pytest.mark.parametrize("code", [Code(200, 55), Code(254, 1), Code(1, 254), Code(16, 12)])
def test_large_codes(engine: Engine, code: Code) -> None:
    pieces = stripe(code, 3 if engine.name == "reedsolo" else 77, 3)
    parity = [np.zeros_like(pieces[0]) for _ in range(code.parity)]
    encode(engine, code, list(pieces[: code.data]), parity)
    assert (np.array(parity) == pieces[code.data :]).all()
    grown = [np.zeros_like(pieces[0]) for _ in range(code.parity)]
    for piece in range(code.data):
        engine.update(code.column(piece), pieces[piece], grown)
    assert (np.array(grown) == pieces[code.data :]).all()
    lost = {piece: np.zeros_like(pieces[0]) for piece in range(min(code.data, code.parity))}
    decode(engine, code, {n: pieces[n] for n in range(code.pieces) if n not in lost}, lost)
    assert all((found == pieces[n]).all() for n, found in lost.items())


@settings(max_examples=30)
@given(CODES, st.integers(0, 700), SEEDS, st.booleans())
@pytest.mark.parametrize("name", ["isal", "tables"])
def test_long_buffers_are_done_in_parts(name: str, code: Code, length: int, seed: int, aligned: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isal, "_MAX_SPAN", 192)
        patch.setattr(tables, "_BLOCK", 128)
        check_parity(open_engine(name), code, length, seed, aligned=aligned)
        pieces = stripe(code, length, seed)
        parity = [np.zeros(length, dtype=np.uint8) for _ in range(code.parity)]
        for piece in range(code.data):
            open_engine(name).update(code.column(piece), pieces[piece], parity)
        assert (np.array(parity) == pieces[code.data :]).all()


@pytest.mark.parametrize("name", ["isal", "tables"])
@pytest.mark.parametrize("code", [Code(3, 1), Code(2, 2), Code(1, 2)])
def test_a_megabyte(name: str, code: Code) -> None:
    engine, length = open_engine(name), (1 << 20) + 13
    pieces = stripe(code, length, 5)
    targets = [Place(length, 0) for _ in range(code.parity)]
    encode(engine, code, [Place(length, 0, piece).bytes for piece in pieces[: code.data]], [t.bytes for t in targets])
    for target, piece in zip(targets, pieces[code.data :], strict=True):
        target.check(piece)


def test_any_buffer_will_do(engine: Engine) -> None:
    code = Code(4, 2)
    values = np.arange(6, dtype=np.float32)
    tensor = torch.arange(12, dtype=torch.bfloat16)
    read_only, written = mmap.mmap(-1, 24, access=mmap.ACCESS_READ), mmap.mmap(-1, 24)
    sources: list[BytesLike] = [values, memory_at(tensor.data_ptr(), tensor.nbytes), bytes(range(24)), read_only]
    target = torch.zeros(24, dtype=torch.uint8)
    encode(engine, code, sources, [written, memory_at(target.data_ptr(), 24)])
    payload = np.array([flat(source) for source in sources])
    expected = multiply(code.parity_rows, payload)
    assert bytes(written) == expected[0].tobytes()
    assert bytes(target.tolist()) == expected[1].tobytes()
    written.close()  # refused while a view is left behind
    read_only.close()


def test_no_bytes_are_no_work(engine: Engine) -> None:
    encode(engine, Code(2, 2), [b"", b""], [bytearray(), memory_at(0, 0)])
    engine.update(Code(2, 2).column(1), b"", [bytearray(), bytearray()])
    decode(engine, Code(2, 2), {0: b"a", 1: b"b"}, {})


def test_buffers_that_do_not_fit_are_refused(engine: Engine) -> None:
    code = Code(2, 1)
    with pytest.raises(ValueError, match="source 1 has 3 bytes, source 0 has 4"):
        encode(engine, code, [b"abcd", b"abc"], [bytearray(4)])
    with pytest.raises(ValueError, match="target 0 has 5 bytes, source 0 has 4"):
        encode(engine, code, [b"abcd", b"abcd"], [bytearray(5)])
    with pytest.raises(ValueError, match="target 0 is read-only"):
        encode(engine, code, [b"abcd", b"abcd"], [bytes(4)])
    with pytest.raises(ValueError, match="target 1 is read-only"):
        engine.update(np.ones(2, dtype=np.uint8), b"abcd", [bytearray(4), memoryview(bytes(4))])
    with pytest.raises(ValueError, match="target 0 has 3 bytes, source 0 has 4"):
        engine.update(np.ones(1, dtype=np.uint8), b"abcd", [bytearray(3)])
    with pytest.raises(ValueError, match="is not contiguous"):
        encode(engine, code, [np.zeros((4, 4), dtype=np.uint8)[:, 1], b"abcd"], [bytearray(4)])


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        (np.ones((1, 3), dtype=np.uint8), r"uint8 of shape \(1, 3\), must be uint8 of shape \(1, 2\)"),
        (np.ones((2, 2), dtype=np.uint8), r"shape \(2, 2\)"),
        (np.ones((1, 2), dtype=np.int64), r"coefficients are int64"),
    ],
)
def test_coefficients_that_do_not_fit_are_refused(engine: Engine, coefficients: Matrix, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.dot(coefficients, [b"ab", b"cd"], [bytearray(2)])


def test_a_sum_of_nothing_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="no sources"):
        engine.dot(np.ones((1, 0), dtype=np.uint8), [], [bytearray(2)])


def test_a_stripe_must_be_whole() -> None:
    engine, code = open_engine(), Code(2, 2)
    with pytest.raises(ValueError, match=r"RS\(2, 2\) takes 2 sources and 2 targets, got 1 and 2"):
        encode(engine, code, [b"a"], [bytearray(1), bytearray(1)])
    with pytest.raises(ValueError, match=r"too few pieces: RS\(2, 2\) needs 2, have 1 \(\[3\]\)"):
        decode(engine, code, {3: b"a"}, {0: bytearray(1)})
    with pytest.raises(ValueError, match=r"pieces \[1\] are both given and wanted"):
        decode(engine, code, {1: b"a", 2: b"b"}, {1: bytearray(1)})
    with pytest.raises(ValueError, match=r"pieces \[4\] do not exist"):
        decode(engine, code, {1: b"a", 2: b"b"}, {4: bytearray(1)})


def test_threads_share_an_engine() -> None:
    engine, code = open_engine(), Code(4, 2)
    pieces = stripe(code, 1 << 16, 9)

    def work(_: int) -> bool:
        parity = [np.zeros(1 << 16, dtype=np.uint8) for _ in range(2)]
        encode(engine, code, list(pieces[:4]), parity)
        return bool((np.array(parity) == pieces[4:]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(32)))


def test_the_wheel_of_pyeclib_has_the_library() -> None:
    paths = library.bundled()
    assert len(paths) == 1, "the layout of pyeclib's wheel has changed"
    found = library.load(str(paths[0]))
    assert found is not None, f"{paths[0]} lacks one of {library.SYMBOLS}"
    pieces = stripe(Code(4, 2), 100, 2)
    parity = [np.zeros(100, dtype=np.uint8) for _ in range(2)]
    encode(isal.IsalEngine(found), Code(4, 2), list(pieces[:4]), parity)
    assert (np.array(parity) == pieces[4:]).all()


def test_calls_release_the_gil() -> None:
    found = library.find()
    assert found is not None
    assert not isinstance(found.functions, ctypes.PyDLL)
    holds = ctypes.pythonapi.PyErr_Clear._flags_ & ~ctypes.CDLL(None).memcpy._flags_
    assert holds
    assert not any(getattr(found.functions, symbol)._flags_ & holds for symbol in library.SYMBOLS)


def test_a_library_that_will_not_do_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load("/nowhere/libisal.so.2") is None
    assert library.load("libc.so.6") is None
    last = str(library.bundled()[0])
    monkeypatch.setattr(library, "candidates", lambda: ["/nowhere/libisal.so.2", "libc.so.6", last])
    found = library.find.__wrapped__()
    assert found is not None
    assert found.path == last
    monkeypatch.setattr(library, "candidates", list)
    assert library.find.__wrapped__() is None


def test_the_systems_library_comes_first() -> None:
    assert library.candidates()[0] == "libisal.so.2"
    assert open_engine().name == open_engine("isal").name == "isal"


def test_without_isal_the_tables_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leto_elastic.protect.engines.find", lambda: None)
    assert open_engine().name == "tables"
    with pytest.raises(ConfigError, match=r"install libisal2 .* or pyeclib"):
        open_engine("isal")


def test_without_pyeclib_nothing_is_bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert library.bundled() == []


def test_an_engine_by_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no coding engine 'zfec': it must be one of auto, isal, tables, reedsolo"):
        open_engine("zfec")


def test_the_slow_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reedsolo")
    with pytest.warns(RuntimeWarning, match="9,000 times slower"):
        open_engine("reedsolo")
    monkeypatch.setitem(__import__("sys").modules, "reedsolo", None)
    with pytest.raises(ConfigError, match=r"leto-elastic\[reedsolo\]"):
        open_engine("reedsolo")


def test_the_slow_engine_sets_its_field_again() -> None:
    reedsolo = pytest.importorskip("reedsolo")
    with pytest.warns(RuntimeWarning):
        engine = open_engine("reedsolo")
    reedsolo.init_tables(0x187)
    target = bytearray(1)
    engine.dot(np.array([[2]], dtype=np.uint8), [b"\x80"], [target])
    assert target == b"\x1d"
