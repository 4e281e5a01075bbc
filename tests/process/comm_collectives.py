"""Four ranks; each collective and each small model on a `leto` group and on a plain gloo group: the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from leto_elastic.comm import Fabric, LetoGroup
from tests.process.comm_ranks import DEADLINE, Channel, Rank, new_store

SIZE = 4
Group = dist.ProcessGroup
Case = Callable[[Group, bool], Any]


def own(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ by rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return (torch.rand(shape, generator=generator) * 100).to(dtype)


def finish(work: Any, *tensors: Any) -> list[torch.Tensor]:
    if work is not None:
        assert work.wait()
    flat: list[torch.Tensor] = []
    for tensor in tensors:
        flat += tensor if isinstance(tensor, list) else [tensor]
    return flat


def all_reduce(op: dist.ReduceOp.RedOpType, dtype: torch.dtype, size: int = 33) -> Case:
    def case(group: Group, later: bool) -> Any:
        value = own(size, dtype=dtype)
        return finish(dist.all_reduce(value, op, group, later), value)

    return case


def broadcast(group: Group, later: bool) -> Any:
    value = own(5, 3)
    return finish(dist.broadcast(value, 2, group, later), value)


def reduce(group: Group, later: bool) -> Any:
    value = own(7)
    work = dist.reduce(value, 1, dist.ReduceOp.SUM, group, later)
    return finish(work, value if dist.get_rank() == 1 else [])


def all_gather(group: Group, later: bool) -> Any:
    values = [torch.empty(2, 3) for _ in range(SIZE)]
    return finish(dist.all_gather(values, own(2, 3), group, later), values)


def all_gather_single(group: Group, later: bool) -> Any:
    value = torch.empty(SIZE * 2, 3)
    return finish(dist.all_gather_single(value, own(2, 3), group, later), value)


def all_gather_coalesced(group: Group, later: bool) -> Any:
    values = [[torch.empty(3), torch.empty(2)] for _ in range(SIZE)]
    work = group.allgather_coalesced(values, [own(3), own(2)])
    return finish(work, [tensor for row in values for tensor in row])


def reduce_scatter(group: Group, later: bool) -> Any:
    value = torch.empty(3)
    return finish(dist.reduce_scatter(value, list(own(SIZE, 3)), dist.ReduceOp.SUM, group, later), value)


def reduce_scatter_single(group: Group, later: bool) -> Any:
    value = torch.empty(3)
    return finish(dist.reduce_scatter_single(value, own(SIZE * 3), dist.ReduceOp.SUM, group, later), value)


def all_to_all(group: Group, later: bool) -> Any:
    values = [torch.empty(2) for _ in range(SIZE)]
    return finish(dist.all_to_all(values, list(own(SIZE, 2)), group, later), values)


def all_to_all_single(group: Group, later: bool) -> Any:
    value = torch.empty(SIZE, 2)
    return finish(dist.all_to_all_single(value, own(SIZE, 2), group=group, async_op=later), value)


def all_to_all_uneven(group: Group, later: bool) -> Any:
    rank = dist.get_rank()
    value = torch.empty(SIZE * (rank + 1))
    work = dist.all_to_all_single(value, own(10), [rank + 1] * SIZE, [1, 2, 3, 4], group, later)
    return finish(work, value)


def gather(group: Group, later: bool) -> Any:
    values = [torch.empty(3) for _ in range(SIZE)] if dist.get_rank() == 1 else None
    return finish(dist.gather(own(3), values, 1, group, later), values or [])


def scatter(group: Group, later: bool) -> Any:
    value = torch.empty(3)
    values = list(own(SIZE, 3)) if dist.get_rank() == 3 else None
    return finish(dist.scatter(value, values, 3, group, later), value)


def barrier(group: Group, later: bool) -> Any:
    return finish(dist.barrier(group, later))


def monitored_barrier(group: Group, later: bool) -> Any:
    group.monitored_barrier(timedelta(seconds=DEADLINE))  # type: ignore[attr-defined]
    return []


def send_recv(group: Group, later: bool) -> Any:
    rank = dist.get_rank()
    value, there, here = torch.empty(4), (rank + 1) % SIZE, (rank - 1) % SIZE
    if later:
        works = [dist.isend(own(4), there, group), dist.irecv(value, here, group)]
        return [finish(work) for work in works] and [value]
    if rank % 2:
        dist.send(own(4), there, group)
        dist.recv(value, here, group)
    else:
        dist.recv(value, here, group)
        dist.send(own(4), there, group)
    return [value]


def recv_from_any(group: Group, later: bool) -> Any:
    if dist.get_rank() == 0:
        values = {}
        for _ in range(SIZE - 1):
            value = torch.empty(2)
            values[dist.recv(value, None, group)] = value
        return [values[rank] for rank in sorted(values)]
    dist.send(own(2), 0, group)
    return []


def batch(group: Group, later: bool) -> Any:
    rank, value = dist.get_rank(), torch.empty(2)
    ops = [
        dist.P2POp(dist.isend, own(2), (rank + 1) % SIZE, group),
        dist.P2POp(dist.irecv, value, (rank - 1) % SIZE, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [value]


def coalesced(group: Group, later: bool) -> Any:
    first, second = own(4), own(2, 2)
    with dist._coalescing_manager(group, async_ops=later) as manager:
        dist.all_reduce(first, group=group)
        dist.all_reduce(second, group=group)
    if later:
        manager.wait()
    third, fourth = torch.empty(SIZE * 2), torch.empty(SIZE)
    with dist._coalescing_manager(group, async_ops=later) as manager:
        dist.all_gather_single(third, own(2), group)
        dist.all_gather_single(fourth, own(1), group)
    if later:
        manager.wait()
    fifth = torch.empty(2)
    with dist._coalescing_manager(group, async_ops=later) as manager:
        dist.reduce_scatter_single(fifth, own(SIZE * 2), group=group)
    if later:
        manager.wait()
    return [first, second, third, fourth, fifth]


def futures(group: Group, later: bool) -> Any:
    value = own(6)
    future = dist.all_reduce(value, group=group, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    gathered = [torch.empty(2) for _ in range(SIZE)]
    outputs = dist.all_gather(gathered, own(2), group, True).get_future().wait()
    return [doubled.wait(), *torch.utils._pytree.tree_leaves(outputs)]


def functional(group: Group, later: bool) -> Any:
    with torch.no_grad():
        return [
            funcol.wait_tensor(tensor)
            for tensor in (
                funcol.all_reduce(own(3), "sum", group),
                funcol.all_gather_tensor(own(2, 2), 0, group),
                funcol.reduce_scatter_tensor(own(8, 2), "sum", 0, group),
                funcol.all_to_all_single(own(8), None, None, group),
                funcol.broadcast(own(3), 1, group),
                *funcol.all_reduce_coalesced([own(3), own(2)], "sum", group),
                *funcol.all_gather_into_tensor_coalesced([own(3), own(2)], group),
                *funcol.reduce_scatter_tensor_coalesced([own(8), own(4)], "sum", [0, 0], group),
            )
        ]


def objects(group: Group, later: bool) -> Any:
    rank = dist.get_rank()
    everyone: list[Any] = [None] * SIZE
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank}, group)
    lists = [["from 2", 7] if rank == 2 else None]
    dist.broadcast_object_list(lists, 2, group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(10, 10 + SIZE)) if rank == 0 else None, 0, group)
    gathered: list[Any] | None = [None] * SIZE if rank == 3 else None
    dist.gather_object(rank * 2, gathered, 3, group)
    return repr((everyone, lists, mine, gathered))


R = dist.ReduceOp
CASES: dict[str, Case] = {
    "all_reduce sum": all_reduce(R.SUM, torch.float32),
    "all_reduce large": all_reduce(R.SUM, torch.float32, 300_001),
    "all_reduce max": all_reduce(R.MAX, torch.float64),
    "all_reduce min": all_reduce(R.MIN, torch.int64),
    "all_reduce product": all_reduce(R.PRODUCT, torch.float32),
    "all_reduce bfloat16": all_reduce(R.SUM, torch.bfloat16),
    "all_reduce band": all_reduce(R.BAND, torch.int32),
    **{
        case.__name__: case
        for case in (
            broadcast,
            reduce,
            all_gather,
            all_gather_single,
            all_gather_coalesced,
            reduce_scatter,
            reduce_scatter_single,
            all_to_all,
            all_to_all_single,
            all_to_all_uneven,
            gather,
            scatter,
            barrier,
            monitored_barrier,
            send_recv,
            recv_from_any,
            batch,
            coalesced,
            futures,
            functional,
            objects,
        )
    },
}


# ---- models: a function of the default backend, because device meshes make their own groups on it


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def train(model: nn.Module) -> list[torch.Tensor]:
    """Three steps on this rank's own data, or the same data where the model's ranks have to agree."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    losses = []
    for _ in range(3):
        loss = model(own(4, 16) / 100).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(local(loss.detach()))
    return [*losses, *(local(parameter.detach()) for parameter in model.parameters())]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ddp() -> list[torch.Tensor]:
    return train(DistributedDataParallel(build(), bucket_cap_mb=1))


def fsdp(mesh: DeviceMesh) -> list[torch.Tensor]:
    model = build()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return train(fully_shard(model, mesh=mesh))


def fsdp_flat() -> list[torch.Tensor]:
    return fsdp(init_device_mesh("cpu", (SIZE,)))


def hsdp() -> list[torch.Tensor]:
    return fsdp(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (SIZE,))
    return train(parallelize_module(build(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def two_dimensions() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(build(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(fully_shard(model, mesh=mesh["data"]))


MODELS = {case.__name__: case for case in (ddp, fsdp_flat, hsdp, tensor_parallel, two_dimensions)}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, str):
        return bool(left == right)
    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


@contextlib.contextmanager
def loopback_interface() -> Iterator[None]:
    """Plain gloo needs to be told; leto is not."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    yield
    del os.environ["GLOO_SOCKET_IFNAME"]


def collectives(rank: int, channel: Channel) -> None:
    fabric = Fabric(rank, SIZE, timeout=DEADLINE)
    fabric.register()
    fabric.connect(0, "127.0.0.1", channel.expect("plan")[0], DEADLINE)
    dist.init_process_group("leto", store=fabric.store, rank=rank, world_size=SIZE)
    with loopback_interface():
        plain = dist.new_group(backend="gloo")
    assert isinstance(dist.group.WORLD, LetoGroup)
    assert not isinstance(plain, LetoGroup)
    wrong = []
    for name, case in CASES.items():
        for later in (False, True):
            expected, found = case(plain, later), case(dist.group.WORLD, later)
            if not same(found, expected):
                wrong.append([name, later, repr(found), repr(expected)])
    channel.send("done", wrong)


def models(rank: int, channel: Channel) -> None:
    port = channel.expect("plan")[0]
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for backend in ("gloo", "leto"):
        fabric = Fabric(rank, SIZE, timeout=DEADLINE)
        fabric.register()
        fabric.connect(0 if backend == "gloo" else 1, "127.0.0.1", port, DEADLINE)
        with loopback_interface() if backend == "gloo" else contextlib.nullcontext():
            store = dist.PrefixStore(backend, fabric.store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=SIZE)
            found[backend] = {name: model() for name, model in MODELS.items()}
            dist.destroy_process_group()
    wrong = [name for name in MODELS if not same(found["leto"][name], found["gloo"][name])]
    channel.send("done", wrong)


def main(what: Callable[[int, Channel], None]) -> None:
    ranks = [Rank(rank, what) for rank in range(SIZE)]
    store = new_store()
    for rank in ranks:
        rank.channel.send("plan", store.port)
    wrong = [rank.channel.expect("done")[0] for rank in ranks]
    print(json.dumps({"wrong": wrong, "exits": [rank.end() for rank in ranks]}))


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    main({"collectives": collectives, "models": models}[sys.argv[1]])
