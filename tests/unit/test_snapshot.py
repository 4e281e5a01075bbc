"""An update that keeps a snapshot is killed at each of its stores and copies.

Of every instant two things are asked: another process finishes the update, and gets the bits of an undisturbed run; and
what is needed for it is there, so that the segments can be made W(s) again, from the records and words alone.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from leto_elastic.errors import StateError
from leto_elastic.state import snapshot
from leto_elastic.state.arena import Arena
from leto_elastic.state.header import NO_TAG, Header, Phase, Position, tag_of
from leto_elastic.state.layout import Chunk, Manifest, Place, decode, encode
from leto_elastic.state.retained import Retained
from leto_elastic.state.transaction import Transaction
from tests.unit.test_transaction import OPTIMIZERS, Segments, state_of

STEPS = 3  # before the one that keeps a snapshot
CHUNK = 16384
OLD, TAG = tag_of(STEPS - 1, 5), tag_of(STEPS, 5)


class Instant(NamedTuple):
    """All that is left of a process that is killed now."""

    after: str
    manifest: Manifest
    content: dict[str, bytes]


class Recorder:
    """Copies everything whenever the process does something that others could see."""

    def __init__(self, own: Segments) -> None:
        self.own = own
        self.manifest = b""
        self.on = False
        self.instants: list[Instant] = []

    def note(self, after: str) -> None:
        if self.on:
            self.instants.append(Instant(after, decode(self.manifest), self.own.copy()))


def recording_header(recorder: Recorder) -> type[Header]:
    def stored(name: str) -> property:
        plain: Any = getattr(Header, name)

        def store(self: Header, value: Any) -> None:
            plain.fset(self, value)
            recorder.note(f"{name} = {value}")

        return property(plain.fget, store)

    def set_buffer(self: Header, index: int, tag: int) -> None:
        Header.set_buffer(self, index, tag)
        recorder.note(f"buffers[{index}] = {tag}")

    words = {name: stored(name) for name in ("position", "target", "agreed")}
    return type("RecordingHeader", (Header,), {**words, "set_buffer": set_buffer})


class Rank:
    """A trainer of a model with a frozen layer, three steps old, about to vote on the next step."""

    def __init__(self, name: str, own: Segments, patch: pytest.MonkeyPatch, buffers: int = 2) -> None:
        self.own = own
        self.recorder = Recorder(own)
        self.model = build()
        self.optimizer = optimizer_of(name, self.model)
        self.retained = Retained.create(
            self.model,
            self.optimizer,
            own.alloc,
            elementwise=None,
            extras_bytes=100,
            chunk_bytes=CHUNK,
            snapshots=buffers,
            replicas=[3],
        )
        self.transaction = self.of(self.retained)
        for step in range(STEPS):
            gradients(self.model, step)
            self.to_vote(step)
            self.finish(step)
        self.publish()
        copy_out = Arena.copy_out

        def recorded(arena: Arena, offset: int, size: int, target: Arena, target_offset: int) -> None:
            half = size // 2  # a kill may also come within a copy
            copy_out(arena, offset, half, target, target_offset)
            self.recorder.note(f"half of {arena.name}[{offset}:{size}] to {target.name}[{target_offset}]")
            copy_out(arena, offset, size, target, target_offset)
            self.recorder.note(f"{arena.name}[{offset}:{size}] to {target.name}[{target_offset}]")

        patch.setattr(Arena, "copy_out", recorded)
        self.retained.header.__class__ = recording_header(self.recorder)

    def of(self, retained: Retained) -> Transaction:
        def torn(chunk: int, chunks: int) -> None:
            self.recorder.note(f"half of chunk {chunk} of {chunks}")

        return Transaction(retained, self.own.alloc, self.publish, torn)

    def publish(self) -> None:
        self.recorder.manifest = encode(self.retained.manifest)

    def to_vote(self, step: int, *, apply: bool = True) -> None:
        self.retained.extras.write(step, f"X({step})".encode())
        self.transaction.save_gradients(apply=apply)
        self.retained.header.position = Position(step, Phase.VOTE, slot=step % 3)

    def finish(self, step: int, *, apply: bool = True) -> None:
        fresh = self.transaction.run() if apply else self.transaction.skip()
        if fresh:
            self.retained.settle(fresh, step + 1, self.own.alloc, CHUNK, buckets=False)
            self.publish()
        commit(self.retained.header, step)

    @property
    def stream(self) -> bytes:
        return stream_in(self.retained.manifest, self.own.copy())


def commit(header: Header, step: int) -> None:
    snapshot.complete(header, step)
    header.position = Position(step + 1, Phase.COMPUTE, slot=(step + 1) % 3)
    snapshot.clear(header)


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.Linear(20, 10), nn.BatchNorm1d(96), nn.Linear(96, 8))
    model[1].requires_grad_(False)
    return model


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    return OPTIMIZERS[name]([{"params": params[:3], "lr": 3e-3}, {"params": params[3:]}])


def gradients(model: nn.Module, step: int) -> None:
    g = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=g) if p.requires_grad else None


def stream_in(manifest: Manifest, content: dict[str, bytes]) -> bytes:
    return b"".join(content[p.segment][p.offset : p.offset + p.size] for p in manifest.stream)


def extras_in(manifest: Manifest, buffer: bytes) -> bytes:
    start = snapshot.extras_at(manifest)
    size, checksum = struct.unpack_from("<QI4x", buffer, start)
    data = buffer[start + 16 : start + 16 + size]
    assert zlib.crc32(data) == checksum
    return data


def put_back(manifest: Manifest, content: dict[str, bytes], header: Header, step: int) -> dict[str, bytes]:
    """What an agent does to return to the start of `step`; AssertionError when the words say that it cannot."""
    position = header.position
    if step in [tag >> 24 for tag in header.buffers if tag != NO_TAG]:
        buffer = [tag >> 24 for tag in header.buffers].index(step)
        ranges = snapshot.all_ranges(manifest)
    elif position.phase is Phase.UPDATE:
        at = snapshot.target_buffer(header, position.step)
        assert at is not None
        buffer, ranges = at, snapshot.undo_ranges(manifest, position)
    else:
        assert position.step == step
        assert snapshot.undo_ranges(manifest, position) == []
        return content
    kept = content[manifest.snapshots[buffer]]
    if ranges:
        assert extras_in(manifest, kept) == f"X({step})".encode()
    changed = {name: bytearray(data) for name, data in content.items()}
    for offset, place in ranges:
        changed[place.segment][place.offset : place.offset + place.size] = kept[offset : offset + place.size]
    return {name: bytes(data) for name, data in changed.items()}


@pytest.fixture
def segments() -> Iterator[Callable[..., Segments]]:
    made: list[Segments] = []

    def make(content: dict[str, bytes] | None = None) -> Segments:
        made.append(Segments() if content is None else Segments.of(content))
        return made[-1]

    yield make
    for one in made:
        one.close()


def expected_after(name: str, apply: bool = True) -> list[torch.Tensor]:
    model = build()
    optimizer = optimizer_of(name, model)
    for step in range(STEPS + apply):
        gradients(model, step)
        optimizer.step()
    return state_of(model, optimizer)


@pytest.mark.parametrize("buffer", [0, 1])
@pytest.mark.parametrize("apply", [True, False], ids=["update", "skip"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd-momentum", "adagrad", "coupled"])
def test_killed_anywhere(
    name: str, apply: bool, buffer: int, segments: Callable[..., Segments], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_after(name, apply)
    with monkeypatch.context() as patch:
        rank = Rank(name, segments(), patch)
        header = rank.retained.header
        header.set_buffer(buffer, OLD)
        held = rank.own.copy()[f"snapshot.{buffer}"]
        gradients(rank.model, STEPS)
        start = rank.stream
        rank.to_vote(STEPS, apply=apply)
        rank.recorder.on = True
        snapshot.begin(header, TAG, buffer)
        rank.finish(STEPS, apply=apply)
        rank.recorder.on = False
    for got, want in zip(state_of(rank.model, rank.optimizer), expected, strict=True):
        assert torch.equal(got, want)
    instants = rank.recorder.instants
    positions = {header_of(instant.content).position for instant in instants}
    chunks = rank.retained.manifest.chunks
    if name == "coupled":
        assert not chunks
        assert Position(STEPS, Phase.UPDATE, slot=0, torn=True) in positions or not apply
    elif apply:
        assert len(chunks) > 2
        assert {p.chunk for p in positions if p.torn} == set(range(len(chunks)))

    for instant in instants:
        if header_of(instant.content).buffers[buffer] == OLD:
            assert instant.content[f"snapshot.{buffer}"] == held, instant.after
        back(instant, start)
        theirs = segments(instant.content)
        model = build()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        optimizer = optimizer_of(name, model)
        gradients(model, 0)
        optimizer.step()  # rehearsed
        taken = Retained.attach(model, optimizer, instant.manifest, theirs.fds, elementwise=None)
        if taken.header.position.phase is Phase.COMPUTE:
            assert taken.header.buffers[buffer] == TAG
            continue
        if taken.header.position.phase is Phase.VOTE:
            snapshot.begin(taken.header, TAG, buffer)  # as the runner does when it learns that the vote passed
        successor = Transaction(taken, theirs.alloc, lambda: None, None)
        successor.load_gradients()
        assert successor.run() == []
        commit(taken.header, STEPS)
        for got, want in zip(state_of(model, optimizer), expected, strict=True):
            assert torch.equal(got, want), instant.after
        assert taken.header.buffers[buffer] == TAG
        assert taken.header.target[0] == NO_TAG
        back(Instant(f"{instant.after}, then finished", instant.manifest, theirs.copy()), start)


def header_of(content: dict[str, bytes]) -> Header:
    alone = Segments.of({"header": content["header"]})
    header = Header(alone.fds["header"][0])
    alone.close()
    return header


def back(instant: Instant, start: bytes) -> None:
    """From this instant the stream can be what it was at the start of the step."""
    content = put_back(instant.manifest, instant.content, header_of(instant.content), STEPS)
    assert stream_in(instant.manifest, content) == start, instant.after


@pytest.mark.parametrize("name", ["adamw", "coupled"])
def test_put_back_in_place_and_redone(
    name: str, segments: Callable[..., Segments], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that did the update lives on: its tensors are in the segments that its agent changes."""
    rank = Rank(name, segments(), monkeypatch)
    header, manifest = rank.retained.header, rank.retained.manifest
    for done in (False, True):
        gradients(rank.model, STEPS)
        rank.to_vote(STEPS)
        snapshot.begin(header, TAG, 0)
        rank.transaction.run()
        if done:
            commit(header, STEPS)
        for segment, data in put_back(manifest, rank.own.copy(), header, STEPS).items():
            if segment != "header":
                rank.retained.arenas[segment].bytes(0, len(data))[:] = data
        header.position = Position(STEPS, Phase.COMPUTE, slot=STEPS % 3)
        rank.transaction.rewound()
    gradients(rank.model, STEPS)
    rank.to_vote(STEPS)
    snapshot.clear(header)  # this time not agreed upon
    rank.finish(STEPS)
    for got, want in zip(state_of(rank.model, rank.optimizer), expected_after(name), strict=True):
        assert torch.equal(got, want)


def test_what_the_manifest_says(segments: Callable[..., Segments], monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank("adamw", segments(), monkeypatch)
    manifest = rank.retained.manifest
    assert dict(zip(manifest.segments, manifest.sizes, strict=True)) == {n: s for n, (_, s) in rank.own.fds.items()}
    assert manifest.replicas == [3]
    assert manifest.snapshots == ["snapshot.0", "snapshot.1"]
    assert [place.segment for place in manifest.stream] == ["weights", "optim"]
    for spec in [*manifest.weights, *manifest.optim]:
        assert 0 <= snapshot.stream_offset(manifest, spec.place) <= snapshot.stream_bytes(manifest) - spec.place.size
    for spec in manifest.buffers:  # part of X
        with pytest.raises(StateError, match="is not in the stream"):
            snapshot.stream_offset(manifest, spec.place)
    plain = Retained.create(
        build(), optimizer_of("adamw", build()), segments().alloc, elementwise=None, extras_bytes=9, chunk_bytes=CHUNK
    )
    assert plain.manifest.stream == plain.manifest.snapshots == plain.manifest.replicas == []
    assert len(plain.manifest.sizes) == len(plain.manifest.segments)


def test_no_snapshot_with_new_parameters(segments: Callable[..., Segments], monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank("adamw", segments(), monkeypatch)
    rank.model[1].requires_grad_(True)
    rank.retained.manifest = manifest_without(rank.retained.manifest, 2)
    gradients(rank.model, STEPS)
    rank.to_vote(STEPS)
    snapshot.begin(rank.retained.header, TAG, 0)
    with pytest.raises(StateError, match="step 3 has new parameters"):
        rank.transaction.run()
    assert rank.retained.header.position.phase is Phase.VOTE, "nothing was begun"


def manifest_without(manifest: Manifest, site: int) -> Manifest:
    """As if a parameter had never had a gradient."""
    data = encode(manifest)
    again = decode(data)
    again.settled.remove(site)
    return again


def test_extras_that_grow_move_the_buffers_with_what_they_hold(
    segments: Callable[..., Segments], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank("adamw", segments(), monkeypatch, buffers=1)
    retained, own = rank.retained, rank.own
    gradients(rank.model, STEPS)
    start = rank.stream
    rank.to_vote(STEPS)
    snapshot.begin(retained.header, TAG, 0)
    rank.finish(STEPS)
    before = retained.manifest
    retained.grow_extras(before.extras_capacity, own.alloc)
    assert retained.manifest.snapshots == before.snapshots, "there was room"
    retained.grow_extras(retained.manifest.extras_capacity * 3, own.alloc)
    manifest = retained.manifest
    assert manifest.snapshots == [f"snapshot.0.{manifest.version - 1}"]
    for one in (before, manifest):
        at = dict(zip(one.segments, one.sizes, strict=True))
        assert at[one.snapshots[0]] >= snapshot.buffer_bytes(one)
        assert stream_in(one, put_back(one, own.copy(), retained.header, STEPS)) == start


def test_a_late_parameter_makes_the_stream_longer(segments: Callable[..., Segments]) -> None:
    own = segments()
    model = build()
    optimizer = OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad])
    retained = Retained.create(
        model, optimizer, own.alloc, elementwise=None, extras_bytes=100, chunk_bytes=CHUNK, snapshots=1
    )
    transaction = Transaction(retained, own.alloc, lambda: None, None)
    lengths = []
    for step in range(3):
        gradients(model, step)
        if step < 1:
            model[3].weight.grad = None
        transaction.save_gradients()
        retained.header.position = Position(step, Phase.VOTE)
        fresh = transaction.run()
        if fresh:
            retained.settle(fresh, step + 1, own.alloc, CHUNK, buckets=False)
        commit(retained.header, step)
        lengths.append(snapshot.stream_bytes(retained.manifest))
    assert lengths[0] < lengths[1] == lengths[2]
    previous = retained.manifest.previous
    assert previous is not None
    assert snapshot.stream_bytes(previous) == lengths[0]
    assert len(previous.sizes) == len(previous.segments)


def test_ranges_by_hand() -> None:
    """Two segments; a gap of 64 bytes between the chunks of the first one."""
    stream = [Place("weights", 0, 256), Place("optim", 0, 128)]
    first = Chunk(0, 0, 1, [Place("weights", 0, 64), Place("optim", 0, 64)])
    second = Chunk(0, 1, 2, [Place("weights", 128, 100), Place("optim", 64, 64)])
    manifest = Manifest(
        1, 1, 0, [], [], [], [], [], [], [first, second], [], True, "extras", 640, "undo", "", [], [], stream
    )
    assert snapshot.extras_at(manifest) == 384
    assert snapshot.buffer_bytes(manifest) == 1024
    assert snapshot.all_ranges(manifest) == [(0, stream[0]), (256, stream[1])]
    one = [(0, Place("weights", 0, 64)), (256, Place("optim", 0, 64))]
    two = [(128, Place("weights", 128, 100)), (320, Place("optim", 64, 64))]

    def undo(phase: Phase, chunk: int, torn: bool) -> list[snapshot.Kept]:
        return snapshot.undo_ranges(manifest, Position(7, phase, chunk=chunk, torn=torn))

    assert undo(Phase.VOTE, 0, False) == undo(Phase.UPDATE, 0, False) == []
    assert undo(Phase.UPDATE, 0, True) == undo(Phase.UPDATE, 1, False) == one
    assert undo(Phase.UPDATE, 1, True) == one + two
    assert undo(Phase.UPDATE, 2, False) == snapshot.all_ranges(manifest)
    touched = [*first.ranges, *second.ranges]
    assert snapshot.still_ranges(manifest, touched) == [
        (64, Place("weights", 64, 64)),
        (228, Place("weights", 228, 28)),
    ]
