"""A living process goes back in its data, having been further than where it goes, over epoch boundaries too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from leto_elastic.errors import StateError
from leto_elastic.state import pack, rng
from leto_elastic.state.data import DataCursor

# torchdata 0.11 sets a vital that torch 2.13 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(7)


class Own:
    """A loader of one's own: its own iterator, with a position that can be set."""

    def __init__(self) -> None:
        self.at, self.over = 0, False

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> int:
        self.over = self.at % 5 == 0 and self.at > 0 and not self.over
        if self.over:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "over": self.over}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.over = state["at"], bool(state["over"])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def loaders() -> dict[str, Any]:
    data = Squares()
    return {
        "list": lambda: [1, 2, 3],
        "shuffled": lambda: DataLoader(data, 3, shuffle=True),
        "sampler": lambda: DataLoader(data, 3, sampler=RandomSampler(data)),
        "own-generator": lambda: DataLoader(data, 3, shuffle=True, generator=seeded()),
        "sampler-generator": lambda: DataLoader(data, 3, sampler=RandomSampler(data, generator=seeded())),
        "distributed": lambda: DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1, seed=4)),
        "workers": lambda: DataLoader(data, 3, shuffle=True, num_workers=1),
        "persistent": lambda: DataLoader(data, 3, shuffle=True, num_workers=1, persistent_workers=True),
        "stream": lambda: DataLoader(Stream(), 3),
        "stateful": lambda: StatefulDataLoader(data, 3, shuffle=True),
        "stateful-generator": lambda: StatefulDataLoader(data, 3, shuffle=True, generator=seeded()),
        "stateful-distributed": lambda: StatefulDataLoader(data, 2, sampler=DistributedSampler(data, 2, 1, seed=4)),
        "stateful-workers": lambda: StatefulDataLoader(data, 3, shuffle=True, num_workers=1),
        "own": Own,
    }


Place = tuple[bytes, bytes]


def place(cursor: DataCursor) -> Place:
    return pack.pack(cursor.position()), pack.pack(rng.capture())


def go(cursor: DataCursor, where: Place) -> None:
    cursor.restore(pack.unpack(where[0]))
    rng.restore(pack.unpack(where[1]))


def take(cursor: DataCursor, count: int) -> list[Any]:
    """Batches, and what the training draws after each."""
    return [(torch.as_tensor(cursor.next()).tolist(), torch.rand(1).item()) for _ in range(count)]


@pytest.mark.parametrize("kind", loaders())
def test_the_same_batches_again(kind: str) -> None:
    """From every step of three epochs back to each before, and on as if nothing had happened; then the same anew."""
    workers = "workers" in kind or kind == "persistent"
    torch.manual_seed(3)
    cursor = DataCursor(loaders()[kind]())
    places: list[Place] = []
    batches: list[Any] = []
    for _ in range(12):
        places.append(place(cursor))
        batches += take(cursor, 1)
    for back in (9, 0) if workers else (11, 8, 7, 4, 3, 1, 0):
        go(cursor, places[back])
        assert take(cursor, 12 - back) == batches[back:], f"back to step {back}"
    other = DataCursor(loaders()[kind]())
    for back in (5,) if workers else (8, 5, 4, 0):
        torch.manual_seed(99)
        go(other, places[back])
        assert take(other, 12 - back) == batches[back:], f"another process at step {back}"


def test_a_generator_cannot_be_read_again() -> None:
    def batches() -> Iterator[int]:
        yield from range(9)

    cursor = DataCursor(batches())
    start = place(cursor)
    take(cursor, 3)
    with pytest.raises(StateError, match="generator can be read only once"):
        go(cursor, start)
    other = DataCursor(batches())  # a process that has not begun gets there
    where = place(cursor)
    go(other, where)
    assert [batch for batch, _ in take(other, 2)] == [3, 4]
