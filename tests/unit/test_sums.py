"""Checksums of the segments hold wherever the trainer is killed, and any bit that differs is found."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from leto_elastic.errors import StateError
from leto_elastic.protect.checksum import checksum_at
from leto_elastic.state.arena import Arena
from leto_elastic.state.header import Header, Phase, Position
from leto_elastic.state.layout import Manifest
from leto_elastic.state.retained import Retained
from leto_elastic.state.sums import Sums, units
from leto_elastic.state.transaction import Transaction
from tests.unit import test_transaction as rig
from tests.unit.test_transaction import Segments, build, gradients, groups, one_step

segments = rig.segments

Moment = tuple[Manifest, dict[str, bytes]]

STEPS = 5


def moments(name: str, late: bool, own: Segments) -> list[Moment]:
    """Copies of a trainer's segments, with the layout in force, at every point where it is killed in some test."""
    model = build()
    optimizer = rig.OPTIMIZERS[name](groups(model))
    retained = Retained.create(
        model, optimizer, own.alloc, elementwise=None, extras_bytes=100, chunk_bytes=16384, checksum=checksum_at
    )
    found: list[Moment] = []

    def look(*_: int) -> None:
        if retained.manifest.version:
            manifest = retained.manifest.at(retained.header.position.step)
            if manifest is not None and manifest.version:
                found.append((manifest, own.copy()))

    transaction = Transaction(retained, own.alloc, lambda: None, look)
    for step in range(STEPS):
        gradients(model, step, late)
        one_step(retained, transaction, step, own)
        look()
        if step == 3:
            transaction.save_gradients(apply=False)
            retained.header.position = Position(step + 1, Phase.VOTE)
            look()
            transaction.skip()
            look()
            retained.header.position = Position(step + 1, Phase.COMPUTE)  # as if it had not been
            assert retained.sums is not None
            retained.sums.retouched(step + 1)
    return found


def check(manifest: Manifest, kept: Segments) -> None:
    arenas = {name: Arena(name, fd, size) for name, (fd, size) in kept.fds.items() if name != "header"}
    header = Header(kept.fds["header"][0])
    Sums(manifest, arenas, checksum_at).check(header.position)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "coupled"])
def test_they_match_at_every_instant(name: str, late: bool, segments: Callable[..., Segments]) -> None:
    found = moments(name, late, segments())
    assert len(found) > STEPS
    for manifest, content in found:
        check(manifest, segments(content))


@pytest.mark.parametrize("name", ["adamw", "coupled"])
def test_a_bit_that_differs_is_found(name: str, segments: Callable[..., Segments]) -> None:
    for manifest, content in moments(name, False, segments()):
        kept = segments(content)
        position = Header(kept.fds["header"][0]).position
        torn = position.chunk if position.phase is Phase.UPDATE and position.torn else -1
        for unit, places in enumerate(units(manifest, len(content["grads"]))[:-1]):
            if not places:
                continue
            segment, offset = places[-1].segment, places[-1].offset + places[-1].size - 1
            if unit == torn:  # half updated anyway: its copy is what counts
                segment, offset = manifest.undo, sum(place.size for place in places) - 1
            flip(kept, segment, offset)
            with pytest.raises(StateError, match="does not match"):
                check(manifest, kept)
            flip(kept, segment, offset)
        if position.phase in (Phase.VOTE, Phase.UPDATE):
            flip(kept, "grads", len(content["grads"]) - 1)
            with pytest.raises(StateError, match="the gradients at step"):
                check(manifest, kept)
            flip(kept, "grads", len(content["grads"]) - 1)
        check(manifest, kept)


def flip(kept: Segments, name: str, where: int) -> None:
    fd = kept.fds[name][0]
    os.pwrite(fd, bytes([os.pread(fd, 1, where)[0] ^ 1]), where)
