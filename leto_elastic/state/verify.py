"""Whether the segments that a dead process left match everything that can be checked about them.

What has a checksum: the extras, always; parameters, optimizer tensors and gradients when the trainer kept them (see
`sums`). Nothing here changes a byte.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from leto_elastic.errors import StateError
from leto_elastic.state.arena import Arena
from leto_elastic.state.extras import Extras
from leto_elastic.state.header import Header, Phase
from leto_elastic.state.layout import Manifest
from leto_elastic.state.sums import Checksum, Sums


def check(manifest: Manifest, segments: Mapping[str, int], checksum: Checksum) -> None:
    """Raises StateError, saying what, for segments that do not fit the layout or a checksum.

    Args:
        manifest: the newest layout that is known.
        segments: descriptors by name, the header's included; nobody writes to them meanwhile.
        checksum: how to make one.
    """
    header = Header(segments["header"])
    try:
        position, newest = header.position, header.layout
    finally:
        header.close()
    if manifest.version < newest:
        raise StateError(f"its layout has changed to version {newest}, version {manifest.version} is known")
    current = manifest.at(position.step)
    if current is None:
        raise StateError(f"nothing was protected at step {position.step}")
    for name, size in zip(current.segments, current.sizes, strict=True):
        if name not in segments:
            raise StateError(f"segment {name} is missing")
        if (found := os.fstat(segments[name]).st_size) < size:
            raise StateError(f"segment {name} has {found} bytes instead of {size}")
    names = [name for name in current.segments if name != "header"]
    arenas = {name: Arena(name, segments[name], os.fstat(segments[name]).st_size) for name in names}
    extras = Extras(arenas[current.extras], current.extras_capacity)
    extras.read(position.slot)
    if position.phase in (Phase.VOTE, Phase.UPDATE):
        extras.read(position.slot + 1)
    if current.sums:
        Sums(current, arenas, checksum).check(position)
