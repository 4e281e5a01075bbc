"""DDP after a backward pass that was left half-way: the same buckets, the same bits, no collective of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from leto_elastic.state.reducer import _layout, forget_backward


class Fabric:
    loopback = False


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(raise_at: int, find_unused: bool) -> tuple[DistributedDataParallel, list[list[int]]]:
    """Six steps of a model with three buckets; in one of them the first backward pass is left half-way."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    model = DistributedDataParallel(net, bucket_cap_mb=0.03, find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    buckets = []

    def fail(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _grad: 1 / 0)  # type: ignore[no-untyped-call]

    for step in range(6):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        if step == raise_at:
            handle = net[3].register_forward_hook(fail)
            with pytest.raises(ZeroDivisionError):
                model(x).square().sum().backward()
            handle.remove()
            optimizer.zero_grad()
            forget_backward(model, Fabric())
        model(x).square().sum().backward()
        buckets.append([len(bucket) for bucket in _layout(model.reducer)])
        optimizer.step()
        optimizer.zero_grad()
    return model, buckets


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("find_unused", [False, True])
def test_as_if_nothing_had_happened(find_unused: bool) -> None:
    expected, buckets = run(-1, find_unused)
    model, again = run(3, find_unused)
    assert again == buckets
    assert (buckets[-1] == buckets[0]) == find_unused, "else they have been rebuilt"
    assert not model._forward_pre_hooks
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
