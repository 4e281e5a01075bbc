"""What a keeper does for others: every request, checked against the world before anything is used.

Only the node that a rank sits on may send its units and copies. A request of a plan that this keeper has not been told
of waits for it; reading a rank's W waits until that rank is known to stand still at the version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.checksum import checksum
from leto_elastic.protect.copies import Copies, Key
from leto_elastic.protect.frames import ANSWER, Connection
from leto_elastic.protect.mapped import Slot, Stream
from leto_elastic.protect.messages import (
    CHUNK,
    Begin,
    Bye,
    Chunk,
    Copy,
    Data,
    Done,
    End,
    Fetch,
    Finish,
    Go,
    Message,
    Put,
    ReadPiece,
    ReadUnit,
    Request,
)
from leto_elastic.protect.placement import unit_range
from leto_elastic.protect.store import Pieces
from leto_elastic.protect.sums import unpack
from leto_elastic.protect.world import PieceKey, Refusal, World
from leto_elastic.state.header import NO_TAG, generation_of

Read = ReadPiece | ReadUnit


@dataclass
class Local:
    """What a keeper knows; everything is read and changed under `changed`, which is notified."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    world: World | None = None
    slots: dict[int, Slot] = field(default_factory=dict)
    served: dict[int, int] = field(default_factory=dict)  # rank to the version that its W stands still at
    closed: bool = False

    def wait(self, ready: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait, under `changed`. Raises Refusal when it is not so in time, or the keeper closes."""
        deadline = time.monotonic() + seconds
        while not ready():
            left = deadline - time.monotonic()
            if self.closed or left <= 0:
                raise Refusal(f"{what}: waited {seconds:.0f} s for it")
            self.changed.wait(left)

    def world_of(self, epoch: int, seconds: float) -> World:
        """The world, once it is of that epoch. Raises Refusal for an epoch that is over."""
        with self.changed:
            self.wait(
                lambda: self.world is not None and self.world.epoch >= epoch, seconds, f"no plan of epoch {epoch} here"
            )
            assert self.world is not None
            return self.world

    def standing(self, rank: int, version: int, epoch: int, seconds: float) -> Slot:
        """A local rank, once its W stands still at `version`."""
        with self.changed:
            self.wait(
                lambda: self.served.get(rank) == version or (self.world is not None and self.world.epoch > epoch),
                seconds,
                f"rank {rank} does not stand at version {version}",
            )
            slot = self.slots.get(rank)
            if slot is None or self.served.get(rank) != version:
                raise Refusal(f"rank {rank} does not stand at version {version} any more")
            return slot


class Desk:
    """Answers requests.

    Args:
        local: the world and the local ranks.
        pieces: parity held for others.
        copies: small copies held for others.
        own: small copies of the local ranks.
        deadline: seconds that a request may wait here.
        on_damaged: called with a rank and a part of its W that does not match its sum.
        on_bye: called with a node that is about to close.
    """

    def __init__(
        self,
        local: Local,
        pieces: Pieces,
        copies: Copies,
        own: Copies,
        *,
        deadline: float,
        on_damaged: Callable[[int, int, int], None],
        on_bye: Callable[[str], None],
    ) -> None:
        self._local = local
        self._pieces = pieces
        self._copies = copies
        self._own = own
        self._deadline = deadline
        self._on_damaged = on_damaged
        self._on_bye = on_bye

    def answer(self, connection: Connection, node: str, request: Request, payload: Bytes) -> Message | None:
        """See `leto_elastic.protect.server.Answer`."""
        match request:
            case Bye():
                self._on_bye(node)
                return Done()
            case Put():
                self._put(node, request, payload)
                return Done()
            case Begin():
                key, world = self._unit(node, request)
                if generation_of(request.tag) != world.generation:
                    raise Refusal(f"tag {request.tag} is not of generation {world.generation}")
                offset = self._pieces.begin(key, request.tag, request.agreed, request.unit, request.length)
                return Go(offset)
            case Chunk():
                key, world = self._unit(node, request)
                code = world.code_of(key)
                self._pieces.add(key, request.tag, request.unit, request.offset, payload, code)
                return Done()
            case Finish():
                key, world = self._unit(node, request)
                units = [index for index, unit in enumerate(world.stripe(key).units) if unit is not None]
                self._pieces.finish(key, request.tag, request.unit, request.crc, units)
                return Done()
            case Fetch():
                self._fetch(connection, node, request)
                return None
            case ReadPiece():
                self._world(node, request.epoch).stripe(PieceKey(request.stripe, request.piece))
                with self._pieces.reading(PieceKey(request.stripe, request.piece), request.tag) as data:
                    stream(connection, Stream([data]), 0, min(request.length, data.size))
                return None
            case ReadUnit():
                self._world(node, request.epoch)
                weights, start, stop = self.unit(request)
                stream(connection, weights, start, stop)
                return None

    def unit(self, request: ReadUnit) -> tuple[Stream, int, int]:
        """W of a local rank and the range of it that is asked for, once it stands still there.

        Raises Refusal when it does not, or does not match its sum.
        """
        slot = self._local.standing(request.rank, request.version, request.epoch, self._deadline)
        if request.part >= request.parts:
            raise Refusal(f"part {request.part} of {request.parts}")
        start, stop = unit_range(slot.weights.size, request.parts, request.part)
        if request.tag != NO_TAG:
            self._verify(slot, request, start, stop)
        return slot.weights, start, min(stop, start + request.length)

    def _verify(self, slot: Slot, request: ReadUnit, start: int, stop: int) -> None:
        data = self._own.get(request.rank, Key("sums", request.tag, request.tag))
        if data is None:
            return
        sums = unpack(data)
        if len(sums) == request.parts:
            good = slot.weights.checksum(start, stop) == sums[request.part]
        else:  # another cut than the sums': all of them must match
            good = slot.weights.sums(len(sums)) == sums
        if not good:
            self._on_damaged(request.rank, request.tag, request.part)
            raise Refusal(f"part {request.part} of rank {request.rank} does not match its checksum")

    def _world(self, node: str, epoch: int) -> World:
        world = self._local.world_of(epoch, self._deadline)
        world.position_of(node)
        return world

    def _unit(self, node: str, request: Begin | Chunk | Finish) -> tuple[PieceKey, World]:
        world = self._world(node, request.epoch)
        key = PieceKey(request.stripe, request.piece)
        rank = world.unit(key, request.unit).rank
        self._only_from(world, node, rank)
        return key, world

    def _put(self, node: str, request: Put, payload: Bytes) -> None:
        world = self._world(node, request.epoch)
        if world.position not in world.keepers_of(request.rank):
            raise Refusal(f"position {world.position} keeps no copies of rank {request.rank}")
        self._only_from(world, node, request.rank)
        if request.tag != NO_TAG and generation_of(request.tag) > world.generation:
            raise Refusal(f"tag {request.tag} is of a later generation than {world.generation}")
        if request.kind == "sums" and request.tag == NO_TAG:
            raise Refusal("sums without a tag")
        if request.kind in ("record", "manifest") and request.tag != NO_TAG:
            raise Refusal(f"a {request.kind} belongs to no protected version")
        key = Key(request.kind, request.version, request.tag)
        self._copies.put(request.rank, key, payload.tobytes(), request.agreed)

    def _fetch(self, connection: Connection, node: str, request: Fetch) -> None:
        self._world(node, request.epoch)
        data = self.copy(request.rank, Key(request.kind, request.version, request.tag))
        if data is None:
            raise Refusal(f"no {request.kind} {request.version} of rank {request.rank} here")
        connection.send(ANSWER, Copy(), data)

    def copy(self, rank: int, key: Key) -> bytes | None:
        """A small copy that is here, of a local rank or of another."""
        data = self._own.get(rank, key)
        return self._copies.get(rank, key) if data is None else data

    @staticmethod
    def _only_from(world: World, node: str, rank: int) -> None:
        position = world.position_of(node)
        if world.ranks.get(rank) != position:
            raise Refusal(f"rank {rank} does not sit on node {node} at position {position}")


def stream(connection: Connection, source: Stream, start: int, stop: int) -> None:
    """Send a range as Data frames and an End."""
    buffer = np.empty(min(CHUNK, stop - start), dtype=np.uint8)
    total = 0
    for offset in range(start, stop, CHUNK):
        data = buffer[: min(CHUNK, stop - offset)]
        source.read(offset, data)
        total = checksum(data, total)
        connection.send(ANSWER, Data(offset - start), data)
    connection.send(ANSWER, End(stop - start, total))
