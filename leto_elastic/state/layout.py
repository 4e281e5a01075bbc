"""What lies where in a trainer's segments: the records that travel from a trainer, by its agent, to a shadow.

Parameters and optimizer tensors lie in the order in which the optimizer walks over its parameters, so that a chunk
(some consecutive parameters of one group) is one byte range of each segment that it touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

ALIGN = 64
VERSION = 1


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A byte range of a segment."""

    segment: str
    offset: int
    size: int


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in a segment.

    `param` is the index of the site it belongs to (-1: a buffer of the model, named by `key`); `key` is "" for the
    parameter itself, else the optimizer's name for it. `dressed`: it is a DTensor like its parameter.
    """

    param: int
    key: str
    place: Place
    shape: list[int]
    stride: list[int]
    dtype: str
    dressed: bool = False


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Parameters `start` to `stop` (site indices) of group `group`, updated and undone together."""

    group: int
    start: int
    stop: int
    ranges: list[Place]

    @property
    def size(self) -> int:
        return sum(place.size for place in self.ranges)


class Manifest(msgspec.Struct, frozen=True):
    """The whole layout of a trainer, from step `since` on; before that `previous` holds."""

    format: int
    version: int
    since: int
    names: list[str]
    group_sizes: list[int]
    weights: list[TensorSpec]
    buffers: list[TensorSpec]
    optim: list[TensorSpec]
    grads: list[TensorSpec]
    chunks: list[Chunk]
    settled: list[int]
    elementwise: bool
    extras: str
    extras_capacity: int
    undo: str
    buckets: str
    segments: list[str]
    sizes: list[int] = []  # of the segments, bytes
    stream: list[Place] = []  # what is protected against lost memory: these ranges, one after the other
    snapshots: list[str] = []  # segments of the snapshot buffers: the stream, then the extras
    replicas: list[int] = []  # ranks whose stream is equal to this one's on purpose, itself included
    sums: str = ""  # segment of the checksums, see `sums`; "": none are kept
    previous: Manifest | None = None

    def at(self, step: int) -> Manifest | None:
        """The layout in force while the header says `step`; None when nothing was protected then."""
        return self if step >= self.since else self.previous


_decoder = msgspec.msgpack.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """Bytes for the wire."""
    return msgspec.msgpack.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Inverse of `encode`. Raises msgspec.ValidationError for anything else."""
    return _decoder.decode(data)


def plan_chunks(
    group_sizes: Sequence[int], tensors: Sequence[TensorSpec], settled: Sequence[int], chunk_bytes: int
) -> list[Chunk]:
    """Cut the settled parameters into chunks of at most `chunk_bytes` (or one parameter) within their groups.

    `tensors` are the parameters and optimizer tensors of all sites, `settled` the sites that have been updated before.
    """
    places: dict[int, list[Place]] = {}
    for spec in tensors:
        places.setdefault(spec.param, []).append(spec.place)
    known = set(settled)
    chunks: list[Chunk] = []
    first = 0
    for group, count in enumerate(group_sizes):
        run: list[int] = []
        size = 0
        for index in range(first, first + count):
            own = sum(place.size for place in places.get(index, []))
            if run and (index not in known or size + own > chunk_bytes):
                chunks.append(_chunk(group, run, places))
                run, size = [], 0
            if index in known:
                run.append(index)
                size += own
        if run:
            chunks.append(_chunk(group, run, places))
        first += count
    return chunks


def _chunk(group: int, run: Sequence[int], places: dict[int, list[Place]]) -> Chunk:
    return Chunk(group, run[0], run[-1] + 1, merge(place for index in run for place in places[index]))


def merge(places: Iterable[Place]) -> list[Place]:
    """Neighbouring ranges of a segment (next to each other but for alignment) as one."""
    spans: dict[str, list[list[int]]] = {}
    for place in sorted(places, key=lambda p: (p.segment, p.offset)):
        rows = spans.setdefault(place.segment, [])
        if rows and place.offset == -(-rows[-1][1] // ALIGN) * ALIGN:
            rows[-1][1] = place.offset + place.size
        else:
            rows.append([place.offset, place.offset + place.size])
    return [Place(name, a, b - a) for name, rows in spans.items() for a, b in rows]
