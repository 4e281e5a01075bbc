"""A step that is left half-way leaves nothing in FSDP2 that the next one would use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from leto_elastic.state.model import local, reset


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)  # the last layer belongs to the root, which stays unsharded after its forward
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module, x: torch.Tensor, sync: bool = True) -> list[torch.Tensor]:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(sync)
    model(x).square().sum().backward()
    return [local(p.grad).clone() for p in model.parameters() if p.grad is not None]


def test_gradients_that_were_not_reduced_are_forgotten() -> None:
    expected = step(sharded(), torch.ones(2, 8))
    model = sharded()
    step(model, torch.full((2, 8), 3.0), sync=False)
    reset(model)
    found = step(model, torch.ones(2, 8))
    assert len(found) == len(expected) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
