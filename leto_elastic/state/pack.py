"""Small state as bytes, without pickle.

What goes into the extras of a trainer (RNG states, positions, `state_dict`s of schedulers and of the user's objects) is
packed as msgpack with a few extension types, so that bytes which may have crossed a network later are only ever
decoded into data. Rejected: `torch.save` (pickle) and JSON (no bytes, no tensors, slow).

Supported: None, bool, int of any size, float, str, bytes, list, tuple, set, dict with str/int/float/bool/None keys,
numpy arrays and scalars, dense `torch.Tensor` (DTensors as their local part is the caller's business).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from leto_elastic.errors import StateError

_TENSOR, _ARRAY, _TUPLE, _BIGINT, _SET, _PAIRS, _DTYPE = range(1, 8)
_DTYPES = {
    str(d): d
    for d in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}

_encoder = msgspec.msgpack.Encoder()


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name such as "torch.float32". Raises StateError for a name that is not one."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise StateError(f"unknown dtype {name!r}") from None


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


def _tensor(data: list[Any]) -> torch.Tensor:
    name, shape, raw = data
    dtype = dtype_of(name)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encoder.encode(value))


def _plain(value: Any, where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if -(1 << 63) <= value < (1 << 64) else _ext(_BIGINT, str(value))
    if kind is list:
        return [_plain(v, where) for v in value]
    if kind is tuple:
        return _ext(_TUPLE, [_plain(v, where) for v in value])
    if isinstance(value, dict):
        if all(type(k) is str for k in value):
            return {k: _plain(v, f"{where}[{k!r}]") for k, v in value.items()}
        return _ext(_PAIRS, [[_plain(k, where), _plain(v, f"{where}[{k!r}]")] for k, v in value.items()])
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return _ext(_TENSOR, [str(value.dtype), list(value.shape), tensor_bytes(value)])
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return _ext(_ARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, np.generic):
        return _plain(value.item(), where)
    if isinstance(value, (set, frozenset)):
        return _ext(_SET, [_plain(v, where) for v in value])
    if isinstance(value, torch.dtype):
        return _ext(_DTYPE, str(value))
    for base in (int, float, str, list, tuple):  # subclasses: enum.IntEnum, named tuples
        if isinstance(value, base):
            convert: type[Any] = base
            return _plain(convert(value), where)
    raise StateError(
        f"{where} holds a {kind.__module__}.{kind.__qualname__}, which cannot be kept with the training state; "
        "state_dict() may hold numbers, strings, bytes, containers, numpy arrays and tensors"
    )


def _ext_hook(code: int, data: memoryview) -> Any:
    value = _decoder.decode(data)
    if code == _TENSOR:
        return _tensor(value)
    if code == _ARRAY:
        dtype, shape, raw = value
        return np.frombuffer(bytearray(raw), dtype=np.dtype(dtype)).reshape(shape)
    if code == _TUPLE:
        return tuple(value)
    if code == _BIGINT:
        return int(value)
    if code == _SET:
        return set(value)
    if code == _PAIRS:
        return dict(value)
    if code == _DTYPE:
        return dtype_of(value)
    raise StateError(f"unknown extension type {code} in packed state")


_decoder = msgspec.msgpack.Decoder(ext_hook=_ext_hook)


def pack(value: Any, where: str = "state") -> bytes:
    """Encode. Raises StateError, naming the path below `where`, for a type that is not supported."""
    return _encoder.encode(_plain(value, where))


def unpack(data: bytes | memoryview) -> Any:
    """Decode what `pack` made. Raises StateError when it is not such a thing."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StateError(f"packed state cannot be decoded: {error}") from error
