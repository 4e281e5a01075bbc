"""The position in the training data, so that a step can be given the same batch again, in any process.

With `state_dict`/`load_state_dict` (torchdata's `StatefulDataLoader`, or your own) the position is the loader's, else
it is (epoch, batches taken), and a process gets there by fast-forward: the epoch's iterator is made again with the
random state it was made with, and that many batches are thrown away. The process may be another one, or this one, which
is further already. Random states are the global ones and those of the loader's and its samplers' generators.

A loader with persistent workers draws other random numbers for its first iterator than for the later ones, so that
first one is thrown away. What such workers draw themselves goes on from epoch to epoch and cannot be had again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

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
        self._generator_states: list[bytes] = []  # when the iterator was made

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
        now = self._stateful or self._seed is None
        position["generators"] = self._capture_generators() if now else self._generator_states
        return position

    def restore(self, position: dict[str, Any]) -> None:
        """Go to a position, also one of another process. Leaves the global random state undefined.

        Raises StateError when the data does not reach that far, or is a generator that has been read already.
        """
        begun, self._iterator = self._iterator is not None or self._taken + self._epoch > 0, None
        if begun and not self._stateful and isinstance(self._source, Iterator):
            raise StateError(
                f"TrainState(data=...): a {type(self._source).__name__} can be read only once, so this process cannot "
                "go back in it; give an iterable that can be iterated again, or one with state_dict/load_state_dict"
            )
        self._epoch, self._taken, self._seed = position["epoch"], position["taken"], position["seed"]
        if self._source is None:
            return
        if self._stateful:
            self._set_epoch()
            self._source.load_state_dict(position["loader"])
            if self._seed is None:
                self._source.state_dict()  # makes an iterator, as `position` did before the first batch
            else:
                self._iterator = iter(self._source)
            self._restore_generators(position["generators"])
            return
        self._prime()
        self._restore_generators(position["generators"])
        if self._seed is not None:
            self._generator_states = position["generators"]
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
        self._prime()
        if self._seed is None:
            self._seed = rng.capture()
            self._generator_states = self._capture_generators()
        self._set_epoch()
        self._iterator = iter(self._source)

    def _prime(self) -> None:
        source = self._source
        if not self._stateful and getattr(source, "persistent_workers", False) and source._iterator is None:
            random, generators = rng.capture(), self._capture_generators()
            iter(source)
            rng.restore(random)
            self._restore_generators(generators)

    def _generators(self) -> list[torch.Generator]:
        source = self._source
        batches = getattr(source, "batch_sampler", None)
        owners = (source, getattr(source, "sampler", None), batches, getattr(batches, "sampler", None))
        found = {id(g): g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)}
        return list(found.values())

    def _capture_generators(self) -> list[bytes]:
        return [generator.get_state().numpy().tobytes() for generator in self._generators()]

    def _restore_generators(self, states: list[bytes]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def _set_epoch(self) -> None:
        sampler = getattr(self._source, "sampler", None)
        inner = getattr(getattr(self._source, "batch_sampler", None), "sampler", None)
        targets: tuple[Any, ...] = (self._source, sampler, inner)
        for target in targets:
            if hasattr(target, "set_epoch"):
                target.set_epoch(self._epoch)
                return
