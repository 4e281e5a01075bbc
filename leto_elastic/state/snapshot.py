"""The snapshot of an update: pre-images kept whole, which are what a rank returns to when memory was lost elsewhere.

A snapshot buffer is a segment: bytes [0, P) mirror the *stream* of the rank (its parameters and optimizer tensors, the
ranges of `Manifest.stream` one after the other), and from `extras_at` on lies X of the same version, as in the extras.
What holds at any instant, for the trainer as for whoever reads its segments after its death:

* `buffers[b] == tag` in the header: buffer b holds that version whole. It is -1 before the first byte is overwritten.
* UPDATE(s) with `target == (tag of s, b)`, once a chunk is torn or done: X(s), what the update does not touch, and the
  pre-image of every such chunk are in buffer b. So copying `undo_ranges` back makes W(s) out of the segments.
* `target` is cleared only after the commit: a coupled optimizer is torn until then, and its pre-image is in there.

Everything here is arithmetic on the records and words of `layout` and `header`; an agent uses it without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leto_elastic.errors import StateError
from leto_elastic.state.header import NO_TAG, Header, Phase, Position, version_of
from leto_elastic.state.layout import ALIGN, Manifest, Place, TensorSpec

Kept = tuple[int, Place]
"""(offset in the snapshot buffer, the range of a segment that lies there), both in bytes."""


def stream_of(specs: Iterable[TensorSpec]) -> list[Place]:
    """The stream of these tensors: for each of their segments its beginning, up to the end of the last of them.

    Parameters and optimizer tensors are meant. The model's buffers lie behind the parameters and are left out: they
    are part of X, and what the segment holds of them need not be equal in replicas.
    """
    ends: dict[str, int] = {}
    for spec in specs:
        ends[spec.place.segment] = max(ends.get(spec.place.segment, 0), spec.place.offset + spec.place.size)
    return [Place(name, 0, _aligned(end)) for name, end in ends.items() if end]


def stream_bytes(manifest: Manifest) -> int:
    """P, the length of the stream in bytes."""
    return sum(place.size for place in manifest.stream)


def extras_at(manifest: Manifest) -> int:
    """Where X begins in a snapshot buffer, in bytes; `manifest.extras_capacity` bytes are kept for it."""
    return _aligned(stream_bytes(manifest))


def buffer_bytes(manifest: Manifest) -> int:
    """The least size of a snapshot buffer."""
    return extras_at(manifest) + manifest.extras_capacity


def stream_offset(manifest: Manifest, place: Place) -> int:
    """Where a range of a segment lies in the stream, in bytes. Raises StateError when it is not wholly in it."""
    offset = 0
    for part in manifest.stream:
        start = place.offset - part.offset
        if part.segment == place.segment and 0 <= start <= part.size - place.size:
            return offset + start
        offset += part.size
    raise StateError(f"{place} is not in the stream {manifest.stream}")


def kept(manifest: Manifest, places: Iterable[Place]) -> list[Kept]:
    """These ranges with their offsets in a snapshot buffer."""
    return [(stream_offset(manifest, place), place) for place in places]


def all_ranges(manifest: Manifest) -> list[Kept]:
    """The whole stream: what makes the version of a buffer that is whole."""
    return kept(manifest, manifest.stream)


def still_ranges(manifest: Manifest, touched: Iterable[Place]) -> list[Kept]:
    """The stream without the ranges that an update touches (frozen parameters, gaps)."""
    rest: list[Place] = []
    spans = sorted(touched, key=lambda place: place.offset)
    for part in manifest.stream:
        at, end = part.offset, part.offset + part.size
        for place in spans:
            if place.segment != part.segment:
                continue
            if place.offset > at:
                rest.append(Place(part.segment, at, place.offset - at))
            at = max(at, place.offset + place.size)
        if end > at:
            rest.append(Place(part.segment, at, end - at))
    return kept(manifest, rest)


def undo_ranges(manifest: Manifest, position: Position) -> list[Kept]:
    """What to copy back, from the buffer that a running update keeps its snapshot in, to be at the start of its step.

    Valid while `target` names `position.step`; nothing for a position that is not within an update.
    """
    if position.phase is not Phase.UPDATE:
        return []
    if position.chunk >= len(manifest.chunks) and (position.torn or manifest.chunks):
        return all_ranges(manifest)  # a coupled optimizer's update, or what is registered to follow the last chunk
    done = manifest.chunks[: position.chunk + position.torn]
    return kept(manifest, [place for chunk in done for place in chunk.ranges])


# ---- the header's words

RESET = -2
"""As the tag of `target`: the commit changes the layout, and what is protected is forgotten. Below every tag."""


def begin(header: Header, tag: int, buffer: int) -> None:
    """The coming update keeps its snapshot in this buffer; call it before UPDATE is stored."""
    header.set_buffer(buffer, NO_TAG)
    header.target = (tag, buffer)


def clear(header: Header) -> None:
    """The coming update keeps no snapshot; or the one of the last update is whole and its step committed."""
    if header.target[0] != NO_TAG:
        header.target = (NO_TAG, 0)


def reset(header: Header) -> None:
    """The coming update keeps no snapshot and ends with a new layout."""
    header.target = (RESET, 0)


def target_buffer(header: Header, step: int) -> int | None:
    """The buffer in which the update of `step` keeps its snapshot, None when it keeps none."""
    tag, buffer = header.target
    return buffer if tag >= 0 and version_of(tag) == step else None


def complete(header: Header, step: int) -> None:
    """Every byte of the snapshot of `step` is in its buffer; call it before the commit is stored."""
    buffer = target_buffer(header, step)
    if buffer is not None:
        header.set_buffer(buffer, header.target[0])


def forget(header: Header) -> None:
    """Nothing is protected any more."""
    header.agreed = NO_TAG
    for buffer in range(len(header.buffers)):
        header.set_buffer(buffer, NO_TAG)
    clear(header)


def kept_tag(header: Header, step: int) -> int:
    """The tag under which the update of `step` keeps, or has kept, its snapshot; -1 for none; RESET as in `target`."""
    if header.target[0] == RESET:
        return RESET
    words: Sequence[int] = (header.target[0], *header.buffers)
    return max((tag for tag in words if tag >= 0 and version_of(tag) == step), default=NO_TAG)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
