"""The small parts of the training state: packing, random numbers, the position in the data, the extras' slots."""

from __future__ import annotations

import collections
import enum
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from leto_elastic.errors import StateError
from leto_elastic.state import pack, rng
from leto_elastic.state.arena import Arena
from leto_elastic.state.data import DataCursor
from leto_elastic.state.extras import SLOTS, Extras, capacity_for
from leto_elastic.state.train_state import TrainState

# torchdata 0.11 sets a vital that torch 2.13 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Color(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -5,
        1 << 90,
        1.5,
        float("inf"),
        "é",
        b"\x00\xff",
        [1, [2]],
        (1, (2, "x")),
        {"a": {"b": (1,)}},
        {1: "x", None: 2},
        {1, 2},
        torch.float8_e4m3fn,
    ],
)
def test_pack_round_trip(value: Any) -> None:
    again = pack.unpack(pack.pack(value))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_pack_tensors(dtype: torch.dtype) -> None:
    matrix = torch.arange(6).reshape(3, 2).to(dtype)
    for tensor in (matrix, matrix.t(), matrix[:0], matrix[1, 1]):
        again = pack.unpack(pack.pack({"t": tensor}))["t"]
        assert again.dtype == dtype
        assert torch.equal(again, tensor)


def test_pack_arrays_scalars_and_subclasses() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    value = {"a": array, "b": np.float32(0.5), "c": Color.RED, "d": collections.OrderedDict(x=1)}
    again = pack.unpack(pack.pack(value))
    assert np.array_equal(again["a"], array)
    assert (again["b"], again["c"], again["d"]) == (0.5, 3, {"x": 1})


def test_pack_refuses_what_it_cannot_keep() -> None:
    with pytest.raises(StateError, match=r"objects\['ema'\]\['fn'\] holds a builtins\.function"):
        pack.pack({"ema": {"fn": lambda: 0}}, "objects")
    with pytest.raises(StateError, match="cannot be decoded"):
        pack.unpack(b"\xc1")


def test_rng_states_come_back() -> None:
    state = pack.unpack(pack.pack(rng.capture()))
    first = (torch.rand(3), random.random(), np.random.rand(), np.random.randn())
    rng.restore(state)
    second = (torch.rand(3), random.random(), np.random.rand(), np.random.randn())
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * index


def loaders() -> dict[str, Any]:
    data = Squares()
    return {
        "random": lambda: DataLoader(data, 3, sampler=RandomSampler(data)),
        "distributed": lambda: DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1, seed=4)),
        "list": lambda: [1, 2, 3],
        "stateful": lambda: StatefulDataLoader(data, 3, shuffle=True),
        "stateful-workers": lambda: StatefulDataLoader(data, 3, shuffle=True, num_workers=1),
    }


@pytest.mark.parametrize("kind", loaders())
@pytest.mark.parametrize("at", [0, 1, 3, 4, 7])
def test_another_process_finds_its_place_in_the_data(kind: str, at: int) -> None:
    """Position and random state travel, packed; the other cursor then gives the same batches for ever."""
    make = loaders()[kind]
    torch.manual_seed(3)
    first = DataCursor(make())
    for _ in range(at):
        first.next()
    position, random_state = pack.pack(first.position()), pack.pack(rng.capture())
    expected = [torch.as_tensor(first.next()).tolist() for _ in range(12)]
    torch.manual_seed(99)
    second = DataCursor(make())
    second.restore(pack.unpack(position))
    rng.restore(pack.unpack(random_state))
    assert [torch.as_tensor(second.next()).tolist() for _ in range(12)] == expected


def test_data_that_is_empty_or_ends_early() -> None:
    with pytest.raises(StateError, match="no batch"):
        DataCursor([]).next()
    cursor = DataCursor([1, 2, 3])
    cursor.next(), cursor.next()
    with pytest.raises(StateError, match="ended after 1 batches of epoch 0, 2 were taken"):
        DataCursor([1]).restore(cursor.position())


def test_extras_keep_three_slots_apart_and_notice_a_changed_byte() -> None:
    capacity = capacity_for(10)
    fd = os.memfd_create("extras")
    os.ftruncate(fd, SLOTS * capacity)
    arena = Arena("extras", fd, SLOTS * capacity)
    os.close(fd)
    extras = Extras(arena, capacity)
    for slot in range(SLOTS):
        extras.write(slot, f"content {slot}".encode())
    assert [extras.read(slot) for slot in range(4)] == [b"content 0", b"content 1", b"content 2", b"content 0"]
    arena.bytes(capacity, 100)[20] ^= 1
    with pytest.raises(StateError, match="slot 1 do not match their checksum"):
        extras.read(1)
    with pytest.raises(StateError, match="do not fit"):
        extras.write(0, b"x" * capacity)


def test_train_state_refuses_what_it_cannot_keep() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(StateError, match="several optimizers are not supported"):
        TrainState(model=model, optimizer=[optimizer])  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"TrainState\(ema=...\): dict has no state_dict"):
        TrainState(model=model, optimizer=optimizer, ema={})
    with pytest.raises(StateError, match="at least 1"):
        TrainState(model=model, optimizer=optimizer).every(0, print)


def test_train_state_restores_what_a_step_changed() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
    before = state.capture({"epoch": 0})
    model(torch.randn(8, 4))
    optimizer.step()
    scheduler.step()
    assert state.capture({"epoch": 0}) != before
    assert state.restore(before, cursor=False) == {"epoch": 0}
    assert state.capture({"epoch": 0}) == before
