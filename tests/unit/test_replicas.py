"""Which ranks are replicas of each other, read off real DDP, FSDP2 and DTensor objects in a process that is alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from leto_elastic.comm import Fabric
from leto_elastic.state.replicas import replicas

SIZE, RANK = 8, 5


@pytest.fixture(autouse=True)
def fabric() -> Iterator[Fabric]:
    """Rank 5 of 8, on loopback groups."""
    fabric = Fabric(RANK, SIZE, timeout=10.0, loopback=True, rebuild=10.0)
    fabric.register()
    dist.init_process_group("leto", store=fabric.store, rank=RANK, world_size=SIZE)
    yield fabric
    dist.destroy_process_group()


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(8))


def of(model: nn.Module) -> list[int]:
    return replicas(model, model.parameters(), RANK)


def test_ddp_over_all_ranks() -> None:
    assert of(DistributedDataParallel(build())) == list(range(SIZE))


def test_ddp_over_a_group() -> None:
    group = dist.new_group([1, 3, 5])
    assert of(DistributedDataParallel(build(), process_group=group)) == [1, 3, 5]


def test_ddp_inside_of_a_model_whose_rest_is_not_wrapped() -> None:
    assert of(nn.Sequential(DistributedDataParallel(build()), nn.Linear(8, 8))) == [RANK]


def test_ddp_that_ignores_a_parameter() -> None:
    model = build()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    assert of(DistributedDataParallel(model)) == [RANK]


def test_fsdp() -> None:
    model = build()
    mesh = init_device_mesh("cpu", (SIZE,))
    fully_shard(model[0], mesh=mesh)
    assert of(fully_shard(model, mesh=mesh)) == [RANK]


@pytest.mark.parametrize(("shape", "expected"), [((2, 4), [1, 5]), ((4, 2), [1, 3, 5, 7])])
def test_hsdp(shape: tuple[int, int], expected: list[int]) -> None:
    """The first dimension of the mesh replicates, the second one shards."""
    model = build()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], mesh=mesh)
    assert of(fully_shard(model, mesh=mesh)) == expected


def test_the_least_equal_parameter_decides() -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
    everywhere = distribute_tensor(torch.ones(8), mesh, [Replicate(), Replicate()])
    sharded = distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(0)])
    other = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Replicate()])
    assert replicas(nn.Module(), [everywhere], RANK) == list(range(SIZE))
    assert replicas(nn.Module(), [everywhere, sharded], RANK) == [1, 3, 5, 7]
    assert replicas(nn.Module(), [other], RANK) == [4, 5]
    assert replicas(nn.Module(), [sharded, other], RANK) == [RANK]


def test_plain() -> None:
    assert of(build()) == [RANK]
    assert of(nn.Module()) == [RANK]
