"""What a keeper is told about the job, what it tells of itself, and the errors of both.

A world is one plan's view: who sits where, and which stripes there are. Everything that a keeper receives is checked
against it before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from leto_elastic.errors import LetoError
from leto_elastic.protect.matrix import Code
from leto_elastic.protect.placement import Placement, Stripe, Unit

LOCAL = -1  # the stripe index of the local tier, in the keys of pieces


class Refusal(LetoError):
    """A keeper does not do what it was asked; the message says why, with the numbers."""


class Disconnected(LetoError):
    """The connection to a peer ended before it had answered."""


class Silent(Disconnected):
    """A peer has not answered in time."""


class CannotRebuild(LetoError):
    """A lost state, or a small copy, cannot be had from what is left."""


class PeerAddress(NamedTuple):
    """A node of the job and where its keeper listens."""

    node: str
    host: str
    port: int


class PieceKey(NamedTuple):
    """A parity piece: stripe index (`LOCAL` for the local tier) and its number among the parity pieces."""

    stripe: int
    piece: int


class World(NamedTuple):
    """The job as of one plan.

    Args:
        generation: see `leto_elastic.state.header.tag_of`.
        epoch: of the plan.
        position: of this node.
        peers: the other nodes, by position.
        placement: the stripes over nodes; None without that tier.
        local: the stripe of this node; None without that tier.
        code: RS(k, m) of the placement.
        ranks: the position of every rank of the job.
    """

    generation: int
    epoch: int
    position: int
    peers: Mapping[int, PeerAddress]
    placement: Placement | None
    local: Stripe | None
    code: Code | None
    ranks: Mapping[int, int]

    @property
    def parts(self) -> int:
        """Parts that a rank's stream is cut into."""
        return self.placement.data if self.placement is not None else 1

    def keepers_of(self, rank: int) -> tuple[int, ...]:
        """Positions that keep the small copies of a rank. Raises Refusal for a rank that the job does not have."""
        if rank not in self.ranks:
            raise Refusal(f"the job has no rank {rank}; it has {len(self.ranks)} ranks")
        return self.placement.keepers_of(rank) if self.placement is not None else ()

    def position_of(self, node: str) -> int:
        """Raises Refusal for a node that is not (or no longer) in the job."""
        for position, peer in self.peers.items():
            if peer.node == node:
                return position
        raise Refusal(f"node {node} is not in epoch {self.epoch} of the job")

    def stripe(self, key: PieceKey) -> Stripe:
        """The stripe of a piece that this node keeps. Raises Refusal when it keeps no such piece."""
        if key.stripe == LOCAL:
            if self.local is None or key.piece != 0:
                raise Refusal(f"there is no piece {key.piece} of a local stripe here")
            return self.local
        stripes = self.placement.stripes if self.placement is not None else ()
        if not 0 <= key.stripe < len(stripes):
            raise Refusal(f"the job has no stripe {key.stripe}; it has {len(stripes)}")
        stripe = stripes[key.stripe]
        if not (0 <= key.piece < len(stripe.holders) and stripe.holders[key.piece] == self.position):
            raise Refusal(f"parity piece {key.piece} of stripe {key.stripe} is not kept at position {self.position}")
        return stripe

    def unit(self, key: PieceKey, index: int) -> Unit:
        """A unit that a piece kept here is made of. Raises Refusal when there is none."""
        units = self.stripe(key).units
        unit = units[index] if 0 <= index < len(units) else None
        if unit is None:
            raise Refusal(f"stripe {key.stripe} has no data unit {index}")
        return unit

    def code_of(self, key: PieceKey) -> Code:
        """The code of a stripe."""
        if key.stripe == LOCAL and self.local is not None:
            return Code(len(self.local.units), 1)
        if self.code is None:
            raise Refusal("this job has no code over its nodes")
        return self.code


class Holdings(NamedTuple):
    """What a keeper holds whole now.

    Args:
        pieces: (tag, stripe index or `LOCAL`, parity number), all with their checksum just verified.
        extras: (rank, version) of small copies of X.
        protected: (rank, tag) for which both X and the sums are here.
        records: (rank, kind) of the other small copies, "record" or "manifest".
    """

    pieces: list[tuple[int, int, int]]
    extras: list[tuple[int, int]]
    protected: list[tuple[int, int]]
    records: list[tuple[int, str]]
