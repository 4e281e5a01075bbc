"""Bringing the segments of a slot to a version, while nobody moves: by its agent, from the slot's own memory.

Nothing here needs to be torn apart safely: if the agent dies in the middle, the segments die with it. What a trainer or
a shadow finds afterwards is a header at the start of a step, and X of that step where the header says.
"""

from __future__ import annotations

import numpy as np

from leto_elastic.errors import StateError
from leto_elastic.protect.mapped import Slot
from leto_elastic.state import snapshot
from leto_elastic.state.header import NO_TAG, Phase, Position, version_of

_SLOTS = 3  # of the extras


def put_back(slot: Slot, version: int, source: str) -> None:
    """Make W and X those of `version` and the header say so.

    Args:
        slot: whose trainer is dead or waits.
        version: what it is brought to.
        source: "undo" (the pre-images that the running update has kept), "buffer 0" or "buffer 1".

    Raises:
        StateError: it is not there.
    """
    header, manifest = slot.header, slot.manifest
    position = header.position
    if source == "undo":
        buffer = snapshot.target_buffer(header, position.step)
        if buffer is None or position.step != version:
            raise StateError(f"no pre-images of version {version} are kept at {position}")
        held = slot.source(buffer)
        for offset, place in snapshot.undo_ranges(manifest, position):
            start = snapshot.stream_offset(manifest, place)
            data = np.empty(place.size, dtype=np.uint8)
            held.read(offset, data)
            slot.weights.write(start, data)
        extras = position.slot
    else:
        index = int(source.removeprefix("buffer "))
        if version_of(header.buffers[index]) != version:
            raise StateError(f"snapshot buffer {index} does not hold version {version}")
        kept = slot.extras(index, 0)  # which may be damaged, before anything is changed
        extras = (position.slot + 1) % _SLOTS
        header.position = Position(version, Phase.SETUP)  # until it is done, only the buffers are of use
        for view in slot.source(index).views(0, slot.weights.size):
            slot.weights.write(0, view)
        slot.write_extras(-1, extras, kept)
    forget_after(slot, version)
    header.position = Position(version, Phase.COMPUTE, slot=extras)


def forget_after(slot: Slot, version: int) -> None:
    """Nothing newer than `version` has ever been: the header's words of protection must not speak of it."""
    header = slot.header
    snapshot.clear(header)
    header.sent = NO_TAG
    if version_of(header.agreed) > version:
        header.agreed = NO_TAG
    for index, tag in enumerate(header.buffers):
        if version_of(tag) > version:
            header.set_buffer(index, NO_TAG)


def keep(slot: Slot, tag: int) -> None:
    """Hold the present W and X, which are those of this tag's version, in a snapshot buffer, as protected."""
    header = slot.header
    if not slot.snapshots:
        return
    index = next((i for i in range(len(slot.snapshots)) if version_of(header.buffers[i]) == version_of(tag)), 0)
    if version_of(header.buffers[index]) != version_of(tag):
        header.set_buffer(index, NO_TAG)
        for view in slot.source(index).views(0, slot.weights.size):
            slot.weights.read(0, view)
        slot.write_extras(index, 0, slot.extras(-1, header.position.slot))
    header.set_buffer(index, tag)
    header.agreed = tag


def begin(slot: Slot, version: int, extras: bytes) -> None:
    """W was written from elsewhere: add X and a header that stands at the start of `version`.

    Before its sections, since the one that had the rank may have been in any of them; the resolution passes over those
    that are not due.
    """
    slot.write_extras(-1, 0, extras)
    slot.header.position = Position(version, Phase.SECTION, slot=0)
