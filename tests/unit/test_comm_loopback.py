"""A process alone with loopback groups: constructors and training steps of real models run to their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Work
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from leto_elastic.comm import Fabric, LetoGroup
from leto_elastic.comm.loopback import OPS
from leto_elastic.comm.store import StoreClient
from leto_elastic.errors import CommunicatorLost, EpochAborted, ShadowUnfit

SIZE, RANK = 4, 2


def start(replay: bytes | None = None) -> Fabric:
    fabric = Fabric(RANK, SIZE, timeout=10.0, loopback=True, replay=replay, rebuild=10.0)
    fabric.register()
    dist.init_process_group("leto", store=fabric.store, rank=RANK, world_size=SIZE)
    return fabric


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    yield start()
    dist.destroy_process_group()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Tanh())


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = model(torch.ones(4, 8)).pow(2).mean()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)


def test_ddp(fabric: Fabric) -> None:
    train(DistributedDataParallel(build(), bucket_cap_mb=1))
    assert fabric.vote(7) == 7


def test_fsdp(fabric: Fabric) -> None:
    model = build()
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in (model[0], model[1]):
        fully_shard(layer, mesh=mesh)
    train(fully_shard(model, mesh=mesh))
    assert fabric.exchange([3]) == [[3]] * SIZE


def test_hsdp_makes_its_groups(fabric: Fabric) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    train(fully_shard(build(), mesh=mesh))
    assert isinstance(mesh.get_group("shard"), LetoGroup)
    assert dist.get_process_group_ranks(mesh.get_group("shard")) == [2, 3]


def call(op: str, group: Any) -> tuple[Any, list[torch.Tensor]]:
    """Call an operation with the arguments it takes; also its outputs."""
    ones, four = torch.ones(SIZE), torch.ones(SIZE * SIZE)
    empty = torch.full((SIZE,), float("nan"))
    rows = [torch.full((SIZE,), float("nan")) for _ in range(SIZE)]
    wide = torch.full((SIZE * SIZE,), float("nan"))
    inputs = [torch.ones(SIZE) for _ in range(SIZE)]
    arguments: dict[str, tuple[tuple[Any, ...], list[torch.Tensor]]] = {
        "allgather": (([rows], [ones]), rows),
        "allgather_coalesced": (([[row] for row in rows], [ones]), rows),
        "gather": (([rows], [ones]), rows),
        "scatter": (([empty], []), [empty]),
        "reduce_scatter": (([empty], [inputs]), [empty]),
        "_allgather_base": ((wide, ones), [wide]),
        "all_gather_single": ((wide, ones), [wide]),
        "allgather_into_tensor_coalesced": (([wide], [ones]), [wide]),
        "all_gather_single_coalesced": (([wide], [ones]), [wide]),
        "_reduce_scatter_base": ((empty, four), [empty]),
        "reduce_scatter_single": ((empty, four), [empty]),
        "reduce_scatter_tensor_coalesced": (([empty], [four]), [empty]),
        "reduce_scatter_single_coalesced": (([empty], [four]), [empty]),
        "alltoall": ((rows, inputs), rows),
        "alltoall_base": ((empty, ones, [], []), [empty]),
        "all_to_all_single": ((empty, ones, [], []), [empty]),
        "send": (([ones], 0, 0), []),
        "recv": (([empty], 0, 0), [empty]),
        "recv_anysource": (([empty], 0), [empty]),
        "barrier": ((), []),
        "monitored_barrier": ((timedelta(seconds=1),), []),
    }
    args, outputs = arguments.get(op, (([ones],), [ones]))
    return getattr(group, op)(*args), outputs


@pytest.mark.parametrize("op", OPS)
def test_every_operation_is_over_at_once(fabric: Fabric, op: str) -> None:
    work, outputs = call(op, dist.group.WORLD)
    for output in outputs:
        assert torch.isfinite(output).all(), "uninitialised memory would upset a rehearsal"
    if op != "monitored_barrier":
        assert work.is_completed()
        assert work.wait()
        found = work.get_future().wait()
        assert [tensor.data_ptr() for tensor in found] == [tensor.data_ptr() for tensor in outputs]


def collectives() -> list[Any]:
    """A set-up of a trainer. Run by rank 2 alone in these tests; `seed` stands for what only another rank knows."""
    number = torch.tensor([dist.get_rank() * 10])
    dist.broadcast(number, 0)
    shares = [torch.empty(2) for _ in range(SIZE)]
    dist.all_gather(shares, torch.tensor([1.0, 2.0]), async_op=True).wait()
    objects: list[Any] = [None, None]
    dist.broadcast_object_list(objects, 0)
    pair = dist.new_group([2, 3])
    dist.all_reduce(number, group=pair)
    return [number, *shares, objects]


class Answered(Work):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class Peers:
    """In place of an inner group: what rank 2 gets from its peers."""

    def __init__(self, source: dict[str, list[torch.Tensor]]) -> None:
        self._source = source

    def __getattr__(self, op: str) -> Any:
        def answer(outputs: Any, *_: Any) -> Any:
            flat = [tensor for row in outputs for tensor in (row if isinstance(row, list) else [row])]
            for tensor in flat:
                tensor.copy_(self._source[op].pop(0).view(tensor.shape))
            return Answered()

        return answer


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What a trainer with peers recorded: objects `["hello", {"seed": 5}]` from rank 0, and so on."""
    fabric = start()
    try:
        sizes = [
            dist.distributed_c10d._object_to_tensor(item, torch.device("cpu"), None) for item in ("hello", {"seed": 5})
        ]
        inner = Peers(
            {
                "broadcast": [torch.tensor([41]), torch.cat([s for _, s in sizes]), torch.cat([t for t, _ in sizes])],
                "allgather": [torch.full((2,), float(rank)) for rank in range(SIZE)],
                "allreduce": [torch.tensor([99])],
            }
        )
        fabric.loopback = False
        monkeypatch.setattr(fabric, "_generation", object())
        monkeypatch.setattr(fabric, "_construct", lambda _g, _d, groups: [setattr(g, "inner", inner) for g in groups])
        dist.group.WORLD.inner = inner  # type: ignore[attr-defined]
        fabric.start_recording()
        found = collectives()
        assert found[-1] == ["hello", {"seed": 5}]
        return fabric.stop_recording()
    finally:
        dist.destroy_process_group()


def test_a_recorded_set_up_comes_out_the_same(record: bytes) -> None:
    fabric = start(record)
    try:
        number, *shares, objects = collectives()
        assert objects == ["hello", {"seed": 5}]
        assert number.item() == 99
        assert [share[0].item() for share in shares] == [0.0, 1.0, 2.0, 3.0]
        fabric.finish_replay()
        dist.all_reduce(number)  # past the set-up
        assert number.item() == 99
    finally:
        dist.destroy_process_group()


def test_another_set_up_is_unfit(record: bytes) -> None:
    fabric = start(record)
    try:
        with pytest.raises(ShadowUnfit, match="set-up collective 0 of group '0' is barrier here and was broadcast"):
            dist.barrier()
        assert fabric.unfit is not None
    finally:
        dist.destroy_process_group()


def test_a_shorter_set_up_is_unfit(record: bytes) -> None:
    fabric = start(record)
    try:
        dist.broadcast(torch.tensor([0]), 0)
        with pytest.raises(ShadowUnfit, match="the trainer made 4 set-up collectives"):
            fabric.finish_replay()
    finally:
        dist.destroy_process_group()


def test_destroyed_groups_are_forgotten(fabric: Fabric) -> None:
    pair = dist.new_group([1, 2])
    assert len(fabric._groups) == 2
    dist.destroy_process_group(pair)
    assert len(fabric._groups) == 1
    assert dist.new_group([0, 1]) is dist.GroupMember.NON_GROUP_MEMBER
    assert len(fabric._groups) == 1


def test_split_group_of_a_group(fabric: Fabric) -> None:
    part = dist.group.WORLD.split_group([0, 2], group_name="part", group_desc="two")  # type: ignore[attr-defined]
    assert (part.rank(), part.size(), part.group_name, part.group_desc) == (1, 2, "part", "two")
    assert dist.group.WORLD.split_group([0, 1]) is None  # type: ignore[attr-defined]


def test_loopback_is_never_poisoned(fabric: Fabric) -> None:
    fabric.abort(3, "test")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert not fabric.poisoned
    with pytest.raises(EpochAborted, match="epoch 3 was aborted: test"):
        fabric.connect(3, "127.0.0.1", 1, 1.0)


# ---- with a store, and one rank of the world in this process


def server() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


def test_ranks_that_do_not_come_are_named() -> None:
    store = server()
    with pytest.raises(CommunicatorLost, match=r"epoch 0: ranks \[1, 2\] did not come within"):
        Fabric(0, 3, timeout=10.0).connect(0, "127.0.0.1", store.port, 0.1)


def test_a_peer_that_dies_between_its_address_and_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo then waits on no socket at all; the abort has to wake it all the same."""
    monkeypatch.setattr(StoreClient, "cut", lambda _: None)  # gloo is past the store; make sure that does not wake it
    store = server()
    fabric = Fabric(0, 2, timeout=60.0, loopback=True, rebuild=60.0)
    fabric.register()
    dist.init_process_group("leto", store=fabric.store, rank=0, world_size=2)
    outcome: list[BaseException | None] = []

    def connect() -> None:
        try:
            fabric.connect(1, "127.0.0.1", store.port, 60.0)
        except EpochAborted as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    try:
        store.set("epoch/1/device/1", "127.0.0.1:1")
        mine = "epoch/1/0/gloo/0/0"
        store.wait([mine], timedelta(seconds=10))
        # The peer's listener has a higher port, so the peer is the one who is to connect; it never does.
        own_port = int(store.get("epoch/1/device/0").decode().rpartition(":")[2])
        rendezvous = store.get(mine)
        place = rendezvous.index(own_port.to_bytes(2, "big"))
        store.set("epoch/1/0/gloo/0/1", rendezvous[:place] + (65535).to_bytes(2, "big") + rendezvous[place + 2 :])
        started = time.monotonic()
        fabric.abort(1, "test")
        thread.join(10.0)
        assert not thread.is_alive()
        assert time.monotonic() - started < 5.0
        assert isinstance(outcome[0], EpochAborted)
    finally:
        dist.destroy_process_group()
