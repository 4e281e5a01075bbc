"""CRC-32 in place: the values of zlib, whichever library computes them."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leto_elastic.protect.buffers import memory_at
from leto_elastic.protect.checksum import checksum, checksum_at
from leto_elastic.protect.library import find

NOISE = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", params=["isal", "zlib"], autouse=True)
def library(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "zlib":
            patch.setattr("leto_elastic.protect.checksum.find", lambda: None)
        else:
            assert find() is not None
        yield


@given(st.integers(0, 200), st.one_of(st.integers(0, 700), st.integers(0, 1 << 15)), SEEDS)
def test_it_is_zlibs(offset: int, length: int, start: int) -> None:
    part = NOISE[offset : offset + length]
    expected = zlib.crc32(part.tobytes(), start)
    assert checksum(part, start) == expected
    assert checksum_at(part.ctypes.data, length, start) == expected
    assert checksum(part) == zlib.crc32(part.tobytes())


@given(st.binary(), st.binary(), SEEDS)
def test_it_goes_on_where_another_ended(one: bytes, other: bytes, start: int) -> None:
    assert checksum(other, checksum(one, start)) == checksum(one + other, start)


def test_known_values() -> None:
    assert checksum(b"123456789") == 0xCBF43926
    assert checksum(b"") == 0
    assert checksum(b"", 7) == 7
    assert checksum_at(0, 0, 7) == 7


def test_any_buffer_will_do() -> None:
    content = bytes(range(100))
    with mmap.mmap(-1, 100) as mapped:
        mapped[:] = content
        assert checksum(mapped) == zlib.crc32(content)
    assert checksum(memoryview(bytearray(content))[3:50]) == zlib.crc32(content[3:50])
    tensor = torch.randn(33).to(torch.bfloat16)
    expected = zlib.crc32(tensor.view(torch.uint8).numpy().tobytes())
    assert checksum_at(tensor.data_ptr(), tensor.nbytes) == expected
    assert checksum(memory_at(tensor.data_ptr(), tensor.nbytes)) == expected


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        checksum(NOISE[::2])
    for start in (-1, 1 << 32):
        with pytest.raises(ValueError, match=f"not {start}"):
            checksum(b"", start)
