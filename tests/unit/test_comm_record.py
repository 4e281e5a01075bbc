"""The set-up record: what comes out is what went in, and another way of the shadow is told."""

from __future__ import annotations

import pytest
import torch

from leto_elastic.comm.record import MAX_OUTPUT, Recorder, Replay
from leto_elastic.errors import ShadowUnfit

VALUES = [
    torch.arange(6, dtype=torch.float32).view(2, 3),
    torch.tensor(7, dtype=torch.int64),
    torch.tensor([True, False]),
    torch.randn(4).to(torch.bfloat16),
    torch.empty(0),
    torch.tensor([1 + 2j]),
]


def record(*outputs: torch.Tensor, op: str = "broadcast", source: int = -1) -> Replay:
    recorder = Recorder()
    number = recorder.began("0", op, list(outputs))
    assert number == 0
    recorder.done("0", number, list(outputs), source)
    return Replay(recorder.encode())


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value.dtype))
def test_round_trip(value: torch.Tensor) -> None:
    target = torch.zeros_like(value)
    assert record(value).take("0", 0, "broadcast", [target]) == -1
    assert torch.equal(target, value)


def test_a_target_that_is_not_contiguous() -> None:
    target = torch.zeros(3, 2).t()
    record(VALUES[0]).take("0", 0, "broadcast", [target])
    assert torch.equal(target, VALUES[0])


def test_the_source_of_a_receive() -> None:
    assert record(VALUES[0], op="recv_anysource", source=3).take("0", 0, "recv_anysource", [torch.zeros(2, 3)]) == 3


def test_outputs_over_the_limit_are_not_kept() -> None:
    large = torch.ones(MAX_OUTPUT // 4 + 1)
    target = torch.zeros_like(large)
    assert record(large).take("0", 0, "broadcast", [target]) == -1
    assert not target.any()
    exact = torch.ones(MAX_OUTPUT // 4)
    target = torch.zeros_like(exact)
    record(exact).take("0", 0, "broadcast", [target])
    assert target.all()


def test_a_call_that_never_completed_has_no_data() -> None:
    recorder = Recorder()
    recorder.began("0", "allreduce", [torch.ones(2)])
    target = torch.zeros(2)
    Replay(recorder.encode()).take("0", 0, "allreduce", [target])
    assert not target.any()


def test_calls_past_the_record() -> None:
    replay = record(VALUES[0])
    assert replay.take("0", 1, "allreduce", []) is None
    assert replay.take("other", 0, "allreduce", []) is None


@pytest.mark.parametrize(
    ("op", "target", "message"),
    [
        ("allreduce", torch.zeros(2, 3), "is allreduce here and was broadcast"),
        ("broadcast", torch.zeros(3, 2), r"outputs \[float32\[3, 2\]\] here and had \[float32\[2, 3\]\]"),
        ("broadcast", torch.zeros(2, 3, dtype=torch.float64), r"\[float64\[2, 3\]\]"),
    ],
)
def test_another_call_is_unfit(op: str, target: torch.Tensor, message: str) -> None:
    with pytest.raises(ShadowUnfit, match=message):
        record(VALUES[0]).take("0", 0, op, [target])
    assert not target.any()


def test_fewer_calls_are_unfit() -> None:
    replay = record(VALUES[0])
    replay.check_complete({"0": 1})
    with pytest.raises(ShadowUnfit, match=r"made 1 set-up collectives in group '0', the shadow only 0"):
        replay.check_complete({})
