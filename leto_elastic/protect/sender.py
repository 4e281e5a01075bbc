"""An attempt to protect a version of one local rank: its stream is read once, and goes to all holders at once.

What is guaranteed: nothing that is not of that version is ever sent. A chunk is copied first; then the header is asked
whether the source is still whole, and only then the copy goes out. (The trainer stores its header before it changes
the first byte.) So holders may resume a unit after a broken connection, and a unit's CRC-32, sent at its end, is that
of the bytes that were sent. `header.sent` is set when every holder has finished every unit and every keeper has X and
the sums.

The copies are few (`WINDOW` chunks), and one is free again when all holders have answered: that bounds what is under
way, and a slow holder slows the attempt down, not the trainer. An attempt whose version is overwritten is given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from leto_elastic.errors import StateError
from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.checksum import checksum
from leto_elastic.protect.copies import Copies, Key
from leto_elastic.protect.mapped import Slot, Stream
from leto_elastic.protect.messages import CHUNK, Answer, Begin, Chunk, Finish, Go, Message, Put, Refused
from leto_elastic.protect.peer import OnAnswer, Peer
from leto_elastic.protect.placement import Stripe, Unit, unit_range
from leto_elastic.protect.store import Pieces
from leto_elastic.protect.sums import pack
from leto_elastic.protect.world import LOCAL, Disconnected, PieceKey, Refusal, World
from leto_elastic.state.header import version_of

WINDOW = 8  # chunks of one rank under way
_LOOK = 0.01  # seconds between looks at the header while waiting
_AGAIN = 0.02  # seconds before another try after a connection broke


class Attempt(NamedTuple):
    """What is asked for; see `Keeper.protect`."""

    rank: int
    tag: int
    buffer: int
    slot: int
    agreed: int


class View(NamedTuple):
    """What an attempt works with, as it is when it starts."""

    world: World
    slot: Slot
    peers: Mapping[int, Peer]


class _GivenUp(Exception):
    """The message is the reason."""


class _Target(NamedTuple):
    """A parity piece that a part of the stream goes into, at another node (`peer`) or here (None)."""

    key: PieceKey
    unit: int
    start: int
    stop: int
    peer: Peer | None


class _Buffer:
    """A chunk that is under way."""

    def __init__(self) -> None:
        self.data: Bytes = np.empty(CHUNK, dtype=np.uint8)
        self.users = 0


class Protector:
    """Protects one local rank, in a thread of its own.

    Args:
        rank: whose attempts come.
        view: what there is to work with now; None when the rank or the world is not known.
        pieces: for the local tier.
        own: where this node's own copies are kept, to be sent again to new keepers.
        on_event: as of the keeper.
    """

    def __init__(
        self,
        rank: int,
        view: Callable[[int], View | None],
        pieces: Pieces,
        own: Copies,
        on_event: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._view = view
        self.pieces = pieces
        self.own = own
        self._on_event = on_event
        self._changed = threading.Condition()
        self._wanted: Attempt | None = None
        self._running: Attempt | None = None
        self._cancelled = ""
        self._closed = False
        self._free = [_Buffer() for _ in range(WINDOW)]
        self._thread = threading.Thread(target=self._run, name=f"leto-protect-{rank}", daemon=True)
        self._thread.start()

    def request(self, attempt: Attempt) -> None:
        """Start this attempt; one that still runs is given up."""
        with self._changed:
            self._wanted, self._cancelled = attempt, "superseded"
            self._changed.notify_all()

    def cancel(self, reason: str) -> None:
        """Give up what runs."""
        with self._changed:
            self._wanted, self._cancelled = None, reason
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread, without waiting for it."""
        with self._changed:
            self._closed = True
        self.cancel("the keeper closes")

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """After `stop`."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._wanted is None and not self._closed:
                    self._changed.wait()
                if self._wanted is None or self._closed:
                    return
                attempt, self._wanted, self._cancelled = self._wanted, None, ""
            started = time.monotonic()
            fields: dict[str, object] = {"rank": attempt.rank, "version": version_of(attempt.tag)}
            try:
                sent = self._protect(attempt)
            except _GivenUp as reason:
                self._on_event("given_up", fields | {"reason": str(reason)})
            except (Refusal, StateError) as error:
                self._on_event("given_up", fields | {"reason": str(error)})
            else:
                seconds = round(time.monotonic() - started, 6)
                self._on_event("protected", fields | {"bytes": sent, "seconds": seconds})

    def _protect(self, attempt: Attempt) -> int:
        """Returns the bytes of the stream. Raises _GivenUp, Refusal or StateError."""
        view = self._view(attempt.rank)
        if view is None:
            raise _GivenUp("the rank has no segments here, or the job is not known yet")
        while True:
            try:
                return _Run(self, attempt, view).run()
            except Disconnected as reason:
                self.pause(attempt, view.slot, str(reason))

    def check(self, attempt: Attempt, slot: Slot, why: str = "") -> None:
        """Raises _GivenUp when the attempt must not go on."""
        if self._cancelled:
            raise _GivenUp(self._cancelled)
        if not slot.holds(attempt.tag, version_of(attempt.tag), attempt.buffer):
            raise _GivenUp(f"the version is overwritten{': ' if why else ''}{why}")

    def pause(self, attempt: Attempt, slot: Slot, why: str) -> None:
        with self._changed:
            self.check(attempt, slot, why)
            self._changed.wait(_AGAIN)

    def wait(self, ready: Callable[[], bool], attempt: Attempt, slot: Slot, why: str) -> None:
        """Wait for answers. Raises _GivenUp when the version is overwritten meanwhile."""
        with self._changed:
            while not ready():
                self.check(attempt, slot, why)
                self._changed.wait(_LOOK)

    def take(self, attempt: Attempt, slot: Slot) -> _Buffer:
        """A free buffer; it must be given back."""
        self.wait(lambda: bool(self._free), attempt, slot, "holders are slow")
        with self._changed:
            return self._free.pop()

    def use(self, buffer: _Buffer) -> None:
        with self._changed:
            buffer.users += 1

    def give(self, buffer: _Buffer) -> None:
        with self._changed:
            buffer.users -= 1
            if not buffer.users:
                self._free.append(buffer)
                self._changed.notify_all()

    def answered(self) -> threading.Condition:
        """What is notified when anything has changed."""
        return self._changed


class _Run:
    """One try of an attempt, over the connections that there are."""

    def __init__(self, owner: Protector, attempt: Attempt, view: View) -> None:
        self._owner = owner
        self._attempt = attempt
        self._world, self._slot, self._peers = view
        self._source: Stream = self._slot.source(attempt.buffer)
        self._changed = owner.answered()
        self._waiting = 0
        self._lost = ""
        self._refused = ""

    def run(self) -> int:
        attempt, slot, owner = self._attempt, self._slot, self._owner
        owner.check(attempt, slot)
        targets = self._targets()
        needed = {target.peer for target in targets if target.peer is not None}
        for peer in needed.union(map(self._peer, self._world.keepers_of(attempt.rank))):
            if not peer.connected:
                raise Disconnected(f"no connection to node {peer.address.node}")
        version = version_of(attempt.tag)
        extras = slot.extras(attempt.buffer, attempt.slot)
        self._copy(Key("extras", version, attempt.tag), extras)
        starts = self._begin(targets)
        sums = self._stream(targets, starts)
        self._settle()
        owner.check(attempt, slot)
        for target in targets:
            self._finish(target, sums[target.start, target.stop])
        parts = [unit_range(self._source.size, self._world.parts, part) for part in range(self._world.parts)]
        self._copy(Key("sums", attempt.tag, attempt.tag), pack([sums[part] for part in parts]))
        self._settle()
        owner.check(attempt, slot)
        slot.header.sent = attempt.tag
        return self._source.size

    def _targets(self) -> list[_Target]:
        world, rank = self._world, self._attempt.rank
        nodes = {world.ranks.get(replica) for replica in self._slot.manifest.replicas}
        if len(nodes) > max(1, world.code.parity if world.code is not None else 0):
            return []  # as many nodes may be lost as the code allows, and an equal stream is left
        targets = []
        for part in range(world.placement.data if world.placement is not None else 0):
            assert world.placement is not None
            stripe = world.placement.stripe_of(rank, part)
            start, stop = unit_range(self._source.size, world.placement.data, part)
            unit = stripe.units.index(Unit(rank, part))
            for piece, position in enumerate(stripe.holders):
                targets.append(_Target(PieceKey(stripe.index, piece), unit, start, stop, self._peer(position)))
        if world.local is not None:
            unit = _unit_of(world.local, rank)
            targets.append(_Target(PieceKey(LOCAL, 0), unit, 0, self._source.size, None))
        return targets

    def _peer(self, position: int) -> Peer:
        peer = self._peers.get(position)
        if peer is None:
            raise Disconnected(f"no node is at position {position}")
        return peer

    def _begin(self, targets: list[_Target]) -> dict[_Target, int]:
        """Announce all units; returns the offset from which each is needed."""
        starts: dict[_Target, int] = {}
        a = self._attempt
        for target in targets:
            length = target.stop - target.start
            if target.peer is None:
                starts[target] = self._owner.pieces.begin(target.key, a.tag, a.agreed, target.unit, length)
                continue
            message = Begin(self._world.epoch, a.tag, a.agreed, *target.key, target.unit, length)

            def on_go(answer: Answer, target: _Target = target) -> None:
                if isinstance(answer, Go):
                    starts[target] = answer.offset

            self._call(target.peer, message, on_value=on_go)
        self._settle()
        return starts

    def _stream(self, targets: list[_Target], starts: Mapping[_Target, int]) -> dict[tuple[int, int], int]:
        """Send all chunks; returns the CRC-32 of every range that is a part or a unit."""
        parts = [unit_range(self._source.size, self._world.parts, part) for part in range(self._world.parts)]
        whole = (0, self._source.size)
        sums = dict.fromkeys([*parts, whole], 0)
        for start, stop in parts:
            here = [target for target in targets if target.start <= start and stop <= target.stop]
            for offset in range(start, stop, CHUNK):
                buffer = self._owner.take(self._attempt, self._slot)
                self._owner.use(buffer)
                try:
                    data = buffer.data[: min(CHUNK, stop - offset)]
                    self._source.read(offset, data)
                    self._owner.check(self._attempt, self._slot)
                    sums[start, stop] = checksum(data, sums[start, stop])
                    if whole != (start, stop):
                        sums[whole] = checksum(data, sums[whole])
                    self._send(here, starts, offset, buffer, data)
                finally:
                    self._owner.give(buffer)
        return sums

    def _send(
        self, targets: list[_Target], starts: Mapping[_Target, int], offset: int, buffer: _Buffer, data: Bytes
    ) -> None:
        crc = checksum(data)
        for target in targets:
            inside = offset - target.start
            skip = starts[target] - inside  # bytes that it has
            if skip >= data.size:
                continue
            rest = data[max(0, skip) :]
            inside += max(0, skip)
            if target.peer is None:
                code = self._world.code_of(target.key)
                self._owner.pieces.add(target.key, self._attempt.tag, target.unit, inside, rest, code)
                continue
            message = Chunk(self._world.epoch, self._attempt.tag, *target.key, target.unit, inside)
            self._call(target.peer, message, rest, crc if skip <= 0 else None, buffer=buffer)

    def _finish(self, target: _Target, crc: int) -> None:
        tag = self._attempt.tag
        if target.peer is None:
            units = [index for index, unit in enumerate(self._world.stripe(target.key).units) if unit is not None]
            self._owner.pieces.finish(target.key, tag, target.unit, crc, units)
        else:
            self._call(target.peer, Finish(self._world.epoch, tag, *target.key, target.unit, crc))

    def _copy(self, key: Key, data: bytes) -> None:
        """Keep a small copy here and send it to the rank's keepers."""
        a = self._attempt
        self._owner.own.put(a.rank, key, data, a.agreed)
        message = Put(self._world.epoch, a.rank, key.kind, key.version, key.tag, a.agreed)
        for position in self._world.keepers_of(a.rank):
            self._call(self._peer(position), message, data)

    def _call(
        self,
        peer: Peer,
        message: Message,
        payload: Bytes | bytes = b"",
        crc: int | None = None,
        *,
        buffer: _Buffer | None = None,
        on_value: Callable[[Answer], None] = lambda _: None,
    ) -> None:
        with self._changed:
            self._raise()
            self._waiting += 1
            if buffer is not None:
                buffer.users += 1
        try:
            peer.call(message, payload, crc=crc, on_answer=self._on_answer(peer, buffer, on_value))
        except Disconnected:
            self._on_answer(peer, buffer, on_value)(None)
            raise

    def _on_answer(self, peer: Peer, buffer: _Buffer | None, on_value: Callable[[Answer], None]) -> OnAnswer:
        def on_answer(answer: Answer | None) -> None:
            with self._changed:
                self._waiting -= 1
                if answer is None:
                    self._lost = self._lost or f"the connection to node {peer.address.node} broke"
                elif isinstance(answer, Refused):
                    self._refused = self._refused or f"node {peer.address.node}: {answer.reason}"
                else:
                    on_value(answer)
                if buffer is not None:
                    self._owner.give(buffer)
                self._changed.notify_all()

        return on_answer

    def _settle(self) -> None:
        """Wait for all answers."""
        self._owner.wait(
            lambda: not self._waiting or bool(self._lost or self._refused),
            self._attempt,
            self._slot,
            "holders are slow",
        )
        with self._changed:
            self._raise()

    def _raise(self) -> None:
        if self._refused:
            raise Refusal(self._refused)
        if self._lost:
            raise Disconnected(self._lost)


def _unit_of(stripe: Stripe, rank: int) -> int:
    units = [unit.rank if unit is not None else None for unit in stripe.units]
    if rank not in units:
        raise Refusal(f"rank {rank} is not in the local stripe of this node")
    return units.index(rank)
