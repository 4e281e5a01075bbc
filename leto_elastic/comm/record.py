"""The set-up collectives of a trainer, recorded for its shadow.

A shadow runs the user's script alone. What its trainer received from peers before the first step (seeds, sizes, object
lists) it gets from here, by group name and the number of the collective within that group. A shadow that asks for
another operation, type or shape than its trainer did would go another way than the trainer at its place: it is unfit.
Outputs over 1 MiB (DDP's broadcast of parameters) are not kept; the attached state replaces them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from leto_elastic.errors import ShadowUnfit

MAX_OUTPUT = 1 << 20  # bytes of all outputs of one collective


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """Type and shape of one output."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype.removeprefix('torch.')}{list(self.shape)}"


class CallRecord(msgspec.Struct, frozen=True, array_like=True):
    """One collective: `data` has the bytes of each output, None when not kept; `source` of a receive from any."""

    op: str
    outputs: tuple[TensorRecord, ...]
    data: tuple[bytes, ...] | None = None
    source: int = -1


class SetupCalls(msgspec.Struct, frozen=True):
    """All recorded collectives, by group name, in the order of their calls."""

    v: int
    groups: dict[str, list[CallRecord]]


def describe(outputs: Sequence[torch.Tensor]) -> tuple[TensorRecord, ...]:
    """Types and shapes of tensors."""
    return tuple(TensorRecord(str(t.dtype), tuple(t.shape)) for t in outputs)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _copy_in(tensor: torch.Tensor, data: bytes) -> None:
    if not data:
        return
    flat = torch.frombuffer(bytearray(data), dtype=tensor.dtype)
    with torch.no_grad():
        tensor.copy_(flat.view(tensor.shape))


class Recorder:
    """Collects the calls of one process."""

    def __init__(self) -> None:
        self._groups: dict[str, list[CallRecord]] = {}

    def began(self, group: str, op: str, outputs: Sequence[torch.Tensor]) -> int:
        """A collective was called; returns its number in the group."""
        calls = self._groups.setdefault(group, [])
        calls.append(CallRecord(op, describe(outputs)))
        return len(calls) - 1

    def done(self, group: str, number: int, outputs: Sequence[torch.Tensor], source: int) -> None:
        """It is complete: keep its outputs."""
        calls = self._groups[group]
        if sum(t.numel() * t.element_size() for t in outputs) <= MAX_OUTPUT:
            data = tuple(_bytes(t) for t in outputs)
            calls[number] = CallRecord(calls[number].op, calls[number].outputs, data, source)

    def encode(self) -> bytes:
        """The record as it goes to the shadow."""
        return msgspec.msgpack.encode(SetupCalls(1, self._groups))


class Replay:
    """The record in the shadow."""

    def __init__(self, encoded: bytes) -> None:
        self._groups = msgspec.msgpack.decode(encoded, type=SetupCalls).groups

    def take(self, group: str, number: int, op: str, outputs: Sequence[torch.Tensor]) -> int | None:
        """Copy the recorded outputs of a call into `outputs`.

        Returns the recorded source rank of a receive, -1 for other calls, None when the call has no record (then it is
        past the set-up). Raises ShadowUnfit when the trainer's call was another one.
        """
        calls = self._groups.get(group, [])
        if number >= len(calls):
            return None
        call = calls[number]
        if call.op != op:
            raise ShadowUnfit(
                f"set-up collective {number} of group {group!r} is {op} here and was {call.op} in the trainer: "
                "the script must make the same collectives in every run of its set-up"
            )
        found = describe(outputs)
        if call.outputs != found:
            raise ShadowUnfit(
                f"set-up collective {number} of group {group!r} ({op}) has outputs {_list(found)} here and had "
                f"{_list(call.outputs)} in the trainer: the script must make the same collectives in every run"
            )
        if call.data is not None:
            for tensor, data in zip(outputs, call.data, strict=True):
                _copy_in(tensor, data)
        return call.source

    def check_complete(self, reached: dict[str, int]) -> None:
        """The set-up is over with `reached` calls by group: raise ShadowUnfit when the trainer had made more."""
        for group, calls in self._groups.items():
            if reached.get(group, 0) < len(calls):
                raise ShadowUnfit(
                    f"the trainer made {len(calls)} set-up collectives in group {group!r}, the shadow only "
                    f"{reached.get(group, 0)}: the script's set-up takes another way in the shadow"
                )


def _list(tensors: tuple[TensorRecord, ...]) -> str:
    return "[" + ", ".join(str(t) for t in tensors) + "]"
