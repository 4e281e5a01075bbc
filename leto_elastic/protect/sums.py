"""The CRC-32 of each part of a rank's stream at a protected version, as a small copy."""

from __future__ import annotations

import msgspec

from leto_elastic.protect.messages import Crc
from leto_elastic.protect.world import Refusal

_decoder = msgspec.msgpack.Decoder(list[Crc])


def pack(sums: list[int]) -> bytes:
    """Bytes to keep."""
    return msgspec.msgpack.encode(sums)


def unpack(data: bytes) -> list[int]:
    """Inverse of `pack`. Raises Refusal for anything else."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise Refusal(f"sums that cannot be read: {error}") from error
