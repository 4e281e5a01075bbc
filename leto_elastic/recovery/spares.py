"""Which spare node takes the place of which lost one: a pure function, so that whoever leads decides alike.

A spare fits when it has as many slots as the node it stands in for. Among those that fit, one of the same failure
domain is best, for the stripes then lie as they lay; next one whose domain no other member of the job has; else the
first one, and some stripe is more exposed than it was (`protect.placement.crowded` says which).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec


class NodeView(msgspec.Struct, frozen=True):
    """A node at a position of the job: its id, its slots, its failure domain."""

    node_id: str
    slots: int
    domain: str = ""


class Spare(msgspec.Struct, frozen=True):
    """A node that waits outside of the job for a place."""

    node_id: str
    slots: int
    domain: str = ""


def fill(lost: Sequence[int], nodes: Sequence[NodeView], spares: Sequence[Spare]) -> dict[int, Spare]:
    """The spare for each lost position; a position that no spare is left for is missing.

    Places are given in the order of positions, and among equally good spares the one given first is taken.
    """
    free = list(spares)
    taken: dict[int, Spare] = {}
    domains = {node.domain for position, node in enumerate(nodes) if position not in lost}

    def give(is_good: Callable[[NodeView, Spare], bool]) -> None:
        for position in sorted(lost):
            node = nodes[position]
            good = (spare for spare in free if spare.slots == node.slots and is_good(node, spare))
            if position not in taken and (spare := next(good, None)) is not None:
                free.remove(spare)
                domains.add(spare.domain)
                taken[position] = spare

    give(lambda node, spare: spare.domain == node.domain)
    give(lambda _, spare: spare.domain not in domains)
    give(lambda *_: True)
    return taken
