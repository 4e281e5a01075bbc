"""The position in the training data, so that a step can be given the same batch again, in any process.

With `state_dict`/`load_state_dict` (torchdata's `StatefulDataLoader`, or your own) the position is the loader's, else
it is (epoch, batches taken), and a new process gets there by fast-forward: the epoch's iterator is made again with the
random state it was made with, and that many batches are thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from leto_elastic.errors import StateError
from leto_elastic.state import rng


class DataCursor:
    """Walks an iterable epoch after epoch.

    Args:
        source: a DataLoader or any iterable that can be iterated once an epoch; None when a job brings its own batches.
    """

    def __init__(self, source: Iterable[Any] | None) -> None:
        self._source: Any = source
        self._stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._taken = 0
        self._seed: dict[str, Any] | None = None

    def next(self) -> Any:
        """The next batch; None without a source. Raises StateError when an epoch has no batch at all."""
        if self._source is None:
            return None
        for _ in range(2):
            if self._iterator is None:
                self._open()
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator, self._seed = None, None
                self._epoch, self._taken = self._epoch + 1, 0
                continue
            self._taken += 1
            return batch
        raise StateError("TrainState(data=...) gave no batch for a whole epoch")

    def position(self) -> dict[str, Any]:
        """Where the next `next()` starts from, as values that `pack` takes."""
        position: dict[str, Any] = {"epoch": self._epoch, "taken": self._taken, "seed": self._seed}
        if self._stateful:
            position["loader"] = self._source.state_dict()
        return position

    def restore(self, position: dict[str, Any]) -> None:
        """Go to a position, also one of another process. Leaves the global random state undefined."""
        self._iterator = None
        self._epoch, self._taken, self._seed = position["epoch"], position["taken"], position["seed"]
        if self._source is None:
            return
        if self._stateful:
            self._set_epoch()
            self._source.load_state_dict(position["loader"])
            return
        if self._seed is not None:
            rng.restore(self._seed)
            self._set_epoch()
            self._iterator = iter(self._source)
            for i in range(self._taken):
                try:
                    next(self._iterator)
                except StopIteration:
                    raise StateError(
                        f"the data ended after {i} batches of epoch {self._epoch}, {self._taken} were taken before; "
                        "data that changes between processes needs state_dict/load_state_dict"
                    ) from None

    def _open(self) -> None:
        if self._seed is None:
            self._seed = rng.capture()
        self._set_epoch()
        self._iterator = iter(self._source)

    def _set_epoch(self) -> None:
        sampler = getattr(self._source, "sampler", None)
        inner = getattr(getattr(self._source, "batch_sampler", None), "sampler", None)
        targets: tuple[Any, ...] = (self._source, sampler, inner)
        for target in targets:
            if hasattr(target, "set_epoch"):
                target.set_epoch(self._epoch)
                return
