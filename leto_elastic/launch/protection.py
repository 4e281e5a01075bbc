"""What an agent does so that a node's memory may be lost: the asyncio side of its keeper.

The keeper works in threads of its own. This object tells it what the job's processes and plans say, and carries out
what follows when nothing moves any more: say where this node's slots stand (`standing`), and bring each of them to the
version that follows from what all nodes said (`restore`), from its own memory or from that of the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from leto_elastic import wire
from leto_elastic.coordinator.schema import ShardRecord
from leto_elastic.errors import LetoError, StateError
from leto_elastic.launch.deciding import Ears
from leto_elastic.launch.etcd_decider import EtcdDecider
from leto_elastic.launch.segments import Memory, Segments
from leto_elastic.launch.slots import Blob
from leto_elastic.launch.slots import Slot as Place
from leto_elastic.launch.terms import Settings
from leto_elastic.launch.world import PlanView, World, code_of
from leto_elastic.observe import report
from leto_elastic.observe.events import EventLog
from leto_elastic.protect import placement as placing
from leto_elastic.protect import putback
from leto_elastic.protect import world as keepers
from leto_elastic.protect.codec import open_engine
from leto_elastic.protect.keeper import Keeper
from leto_elastic.protect.mapped import Slot
from leto_elastic.protect.matrix import Code
from leto_elastic.recovery.choice import Choice, NodeStanding, SlotStanding, choose
from leto_elastic.state import layout
from leto_elastic.state.header import NO_TAG, Phase, tag_of, version_of

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(NodeStanding).decode

_MOMENT = 0.5  # seconds for a node to show that it is there

_STANDS = (Phase.SECTION, Phase.COMPUTE, Phase.VOTE, Phase.DONE)


class Damaged(LetoError):
    """The memory of these ranks is not what it was when it was protected; or they could not be restored."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Overtaken(LetoError):
    """There is a plan for a later epoch, which begins everything again."""


class Protection:
    """See the module.

    Args:
        settings: of the job.
        decider: whose opening starts the keeper, and who publishes the shard map.
        events: where damage and restorations are noted.
    """

    def __init__(self, settings: Settings, decider: EtcdDecider, events: EventLog) -> None:
        self._settings = settings
        self._policy = settings.policy
        self._decider = decider
        self._events = events
        self._ears: Ears
        self._keeper: Keeper | None = None
        self._world = World((), None)
        self._epoch = -1
        self._placement: placing.Placement | None = None
        self._local: dict[int, placing.Stripe] = {}
        self._slots: dict[int, Slot] = {}
        self._shards: dict[int, ShardRecord] = {}
        self._newest: dict[int, int] = {}  # step that each rank has come to
        self._one_at_a_time = asyncio.Lock()
        self._engine = open_engine(self._policy.protect.codec)
        decider.make_keeper = self._open

    def listen(self, ears: Ears) -> None:
        """Tell this one about nodes that are dead for certain."""
        self._ears = ears
        self._loop = asyncio.get_running_loop()

    def _open(self, node: str, key: bytes) -> int:
        self._keeper = Keeper(
            self._settings.run_id,
            node,
            key,
            self._settings.address,
            engine=self._engine,
            limit=int(self._policy.protect.max_fraction * Memory().room().total),
            on_lost=self._lost,
            on_event=lambda event, fields: self._tell(self._heard, event, fields),
            deadline=self._policy.deadlines.restore,
            connect=self._policy.deadlines.connect,
        )
        return self._keeper.start()[1]

    def _lost(self, position: int, _reason: str) -> None:
        self._tell(self._dead, self._world.seats[position].node, position)

    def _dead(self, node: str, position: int) -> None:
        self._decider.depose(node)
        self._ears.node_gone(position)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """From a thread of the keeper's, which may live on for a moment after the loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """End the keeper. Blocks for about a second at most."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    def forget(self) -> None:
        """This node has no place in the job any more."""
        self.close()
        self._slots.clear()
        self._shards.clear()
        self._newest.clear()

    @property
    def buffers(self) -> int:
        """Snapshot buffers of a trainer; 0: nothing is protected."""
        return self._policy.protect.global_.buffers if self._placement is not None or self._local else 0

    def configure(self, plan: PlanView) -> None:
        """A plan that this node has a place in. Raises ConfigError when its nodes are too few for the policy."""
        world = plan.world
        code = code_of(self._policy, world.seats)
        if world.position is None or self._keeper is None:
            return
        seats = [placing.Seat(p, seat.place, tuple(world.ranks(p))) for p, seat in enumerate(world.seats)]
        self._placement = placing.place(seats, *code) if code is not None else None
        tier = self._policy.protect.local.parity
        self._local = {seat.position: placing.place_local(seat) for seat in seats} if tier else {}
        self._epoch = plan.epoch
        again = world.generation != self._world.generation
        self._world = world
        self._keeper.configure(
            keepers.World(
                generation=world.generation,
                epoch=plan.epoch,
                position=world.position,
                peers={
                    p: keepers.PeerAddress(seat.node, seat.address, seat.keeper)
                    for p, seat in enumerate(world.seats)
                    if p != world.position
                },
                placement=self._placement,
                local=self._local.get(world.position),
                code=Code(*code) if code is not None else None,
                ranks={rank: p for p in range(len(world.seats)) for rank in world.ranks(p)},
            )
        )
        for rank, shard in self._shards.items() if again else ():
            self._shard(rank, msgspec.structs.replace(shard, state="repairing", holders=self._holders(rank)))

    async def answers(self, position: int) -> bool:
        """Whether the keeper at a position does, within a moment."""
        keeper = self._keeper
        return keeper is not None and await asyncio.to_thread(keeper.answers, position, _MOMENT)

    # ---- what processes say

    def recorded(self, rank: int, record: Blob) -> None:
        """The set-up record of a rank."""
        if self.buffers:
            self._keeper_now().publish(rank, "record", 0, _content(record))

    def laid_out(self, rank: int, blob: Blob, held: Segments) -> None:
        """The manifest of a rank."""
        if self.buffers:
            data = _content(blob)
            manifest = layout.decode(data)
            self._attach(rank, manifest, held)
            self._keeper_now().publish(rank, "manifest", manifest.version, data)
            self._new_shard(rank, manifest, data)

    def _new_shard(self, rank: int, manifest: layout.Manifest, data: bytes) -> None:
        """The record of a rank that nothing is protected of yet, or not since it came to this node."""
        shard = ShardRecord(
            rank=rank,
            version=-1,
            generation=self._world.generation,
            bytes=self._slots[rank].weights.size,
            chunks=len(manifest.chunks),
            digest=hashlib.sha256(data).hexdigest()[:16],
            holders=self._holders(rank),
            state="writing",
        )
        self._shard(rank, shard)

    def advanced(self, rank: int, message: wire.Stepped | wire.Due) -> None:
        """A trainer has committed a step, or asks for a version to be protected."""
        slot, keeper = self._slots.get(rank), self._keeper
        if slot is None or keeper is None or not self.buffers:
            return
        if isinstance(message, wire.Due):
            if message.generation == self._world.generation:
                tag = tag_of(message.step, message.generation)
                keeper.protect(rank, tag, buffer=message.buffer, slot=message.slot, agreed=slot.header.agreed)
            return
        self._newest[rank] = message.step
        try:
            extras = slot.extras(-1, message.slot)
        except StateError:
            return  # the trainer is a step ahead by now, and says so next
        keeper.publish(rank, "extras", message.step, extras)

    def _attach(self, rank: int, manifest: layout.Manifest, held: Segments) -> Slot:
        slot = self._slots[rank] = Slot(manifest, held.fds)
        self._keeper_now().attach(rank, manifest, held.fds)
        return slot

    # ---- what the keeper says

    def _heard(self, event: str, fields: dict[str, Any]) -> None:
        shard = self._shards.get(fields.get("rank", -1))
        match event:
            case "protected" if shard is not None:
                version = fields["version"]
                if shard.state != "complete":
                    self._events.write("protected", **fields)
                complete = msgspec.structs.replace(
                    shard, version=version, generation=self._world.generation, state="complete", lag=0
                )
                self._shard(shard.rank, complete)
            case "given_up" if shard is not None:
                late = self._newest.get(shard.rank, 0) - max(shard.version, 0) - self._policy.protect.global_.every
                if late > shard.lag:
                    self._shard(shard.rank, msgspec.structs.replace(shard, lag=late))
            case "damaged":
                part = f"part {fields.get('part')} of the state of rank {fields.get('rank')}"
                piece = f"parity piece {fields.get('piece')} of stripe {fields.get('stripe')}"
                what = part if "rank" in fields else piece
                self._emit("damaged", what=what, reason="its checksum does not match", version=fields["version"])
            case "refused":
                self._events.write("refused", **fields)

    def _emit(self, event: str, **fields: Any) -> None:
        self._events.write(event, **fields)
        line = report.line({"event": event, **fields})
        if line is not None:
            print(line, file=sys.stderr, flush=True)

    def _shard(self, rank: int, shard: ShardRecord) -> None:
        self._shards[rank] = shard
        self._decider.shard(shard)

    def _holders(self, rank: int) -> tuple[int, ...]:
        """Positions that hold parity of a rank."""
        placement = self._placement
        if placement is None:
            return ()
        return tuple(sorted({p for part in range(placement.data) for p in placement.stripe_of(rank, part).holders}))

    # ---- on the way into an epoch

    async def standing(self, places: Sequence[Place]) -> bytes:
        """What this node has, for all others; nothing of it is being changed by an earlier recovery."""
        keeper = self._keeper_now()
        assert self._world.position is not None
        async with self._one_at_a_time:
            stands = [await asyncio.to_thread(self._stands, place) for place in places]
            holdings = await asyncio.to_thread(keeper.holdings)
        return _encode(
            NodeStanding(
                self._world.position,
                stands,
                [piece for piece in holdings.pieces if piece[1] != keepers.LOCAL],
                holdings.extras,
                [tag for tag, stripe, _ in holdings.pieces if stripe == keepers.LOCAL],
                holdings.protected,
            )
        )

    def _stands(self, place: Place) -> SlotStanding:
        header, slot = place.held.header, self._slots.get(place.rank)
        if place.lost or header is None:
            return SlotStanding(place.rank, True)
        if slot is None:
            return SlotStanding(place.rank, False, header.position.pack())
        words, manifest = slot.header, slot.manifest
        if place.trainer is None and not self._is_sound(place.rank, slot):
            place.lost = True
            return SlotStanding(place.rank, True)
        word = words.position.pack()
        return SlotStanding(
            place.rank, False, word, words.buffers, words.target[0], manifest.replicas, slot.weights.size
        )

    def _is_sound(self, rank: int, slot: Slot) -> bool:
        """Whether what a dead trainer has left is what was protected, as far as that can be told."""
        position, tag = slot.header.position, slot.header.sent
        if position.step != version_of(tag) or position.phase not in _STANDS:
            return True
        try:
            self._verify(rank, tag)
        except Damaged as error:
            self._tell(self._found, rank, str(error))
            return False
        return True

    def _found(self, rank: int, reason: str) -> None:
        self._emit("damaged", what=f"memory of ranks {[rank]}", reason=reason)

    async def restore(
        self, epoch: int, places: Sequence[Place], held: Mapping[int, Segments], said: Mapping[int, bytes]
    ) -> tuple[int | None, dict[int, Blob]]:
        """Bring the slots of this node to the version that follows from what all nodes said.

        Returns it (None when there was nothing to do), and the manifests of slots whose memory was lost, by index.

        Raises:
            StateError: there is no such version; the job cannot go on.
            Damaged: a slot of this node could not be restored, or what it had is not what it should be.
            Overtaken: there is a plan for a later epoch.
        """
        standings = [_decode(payload) for _, payload in sorted(said.items())]
        choice = choose(standings, self._placement, self._local)
        version = choice.version
        if version is None:
            return None, {}
        async with self._one_at_a_time:
            if epoch != self._epoch:
                raise Overtaken(f"epoch {epoch} is over")
            began = time.monotonic()
            mine = [place for place in places if place.rank in choice.rebuild]
            await _all(
                [asyncio.to_thread(self._settle, place.rank, choice, version) for place in places if place not in mine]
            )
            there = sorted(s.position for s in standings if any(slot.rank not in choice.rebuild for slot in s.slots))
            kept = _common(standings)
            datas = await _all(
                [
                    asyncio.to_thread(self._rebuild, epoch, place.rank, held[place.index], choice, version, kept, there)
                    for place in mine
                ]
            )
        for place, data in zip(mine, datas, strict=True):
            self._new_shard(place.rank, layout.decode(data), data)
        blobs = {place.index: _blob(data, layout.decode(data).version) for place, data in zip(mine, datas, strict=True)}
        if mine:
            ranks = [place.rank for place in mine]
            self._emit("restored", ranks=ranks, version=version, seconds=time.monotonic() - began)
        return version, blobs

    def _settle(self, rank: int, choice: Choice, version: int) -> None:
        """A slot that has the version in its own memory, or rolls forward to it by itself."""
        slot, keeper = self._slots[rank], self._keeper_now()
        words = (slot.header.sent, slot.header.agreed, *slot.header.buffers)
        known = max((tag for tag in words if version_of(tag) == version), default=NO_TAG)
        source = choice.put_back.get(rank)
        if source is not None:
            putback.put_back(slot, version, source)
        position = slot.header.position
        if position.step != version or position.phase not in _STANDS:
            return
        if known != NO_TAG:
            self._verify(rank, known)
        putback.forget_after(slot, version)
        if choice.tag != NO_TAG:  # every rank had sent it, so it may take the place of what was protected before
            putback.keep(slot, choice.tag)
        keeper.serve(rank, version)

    def _verify(self, rank: int, tag: int) -> None:
        """Raises Damaged when W is not what was protected as `tag`."""
        try:
            bad = self._keeper_now().verify(rank, tag)
        except keepers.Refusal:
            return  # it was protected by another agent, or not yet
        if bad:
            raise Damaged(f"part {bad[0]} of the state of rank {rank} does not match its checksum", [rank])

    def _rebuild(
        self, epoch: int, rank: int, held: Segments, choice: Choice, version: int, kept: int, there: list[int]
    ) -> bytes:
        """A slot whose memory was lost. Returns its manifest."""
        keeper, plan = self._keeper_now(), choice.rebuild[rank]
        lost = sorted(choice.rebuild)
        try:
            data = keeper.fetch(rank, "manifest", 0, there)
            manifest = layout.decode(data)
            for name, size in zip(manifest.segments, manifest.sizes, strict=True):
                if name not in held.fds:
                    held.alloc(name, size)
            assert held.header is not None
            held.header.initialise()
            slot = self._attach(rank, manifest, held)
            extras = keeper.fetch(rank, "extras", version, [plan.extras, *there])
            keeper.rebuild(rank, version, epoch=epoch, tag=plan.tag, lost=lost, sources=there)
        except LetoError as error:
            raise Damaged(f"rank {rank} could not be restored: {error}", [rank]) from error
        putback.begin(slot, version, extras)
        if choice.tag != NO_TAG:
            putback.keep(slot, choice.tag)
        else:
            slot.header.agreed = kept
        keeper.publish(rank, "manifest", manifest.version, data)
        keeper.publish(rank, "extras", version, extras)
        return data

    def resume(self) -> None:
        """Training goes on: nobody may read this node's state as that of a version any more."""
        for rank in self._slots:
            self._keeper_now().serve(rank, None)

    async def recall(self, rank: int) -> Blob:
        """The set-up record of a rank whose node is lost. Raises CannotRebuild when nobody has it."""
        others = [p for p in range(len(self._world.seats)) if p != self._world.position]
        keeper = self._keeper_now()
        data = await asyncio.to_thread(keeper.fetch, rank, "record", 0, others)
        keeper.publish(rank, "record", 0, data)
        return _blob(data)

    def _keeper_now(self) -> Keeper:
        assert self._keeper is not None
        return self._keeper


def _common(standings: Sequence[NodeStanding]) -> int:
    """The newest tag that all ranks that are left hold in a snapshot buffer."""
    held = [set(slot.buffers) for node in standings for slot in node.slots if not slot.lost]
    return max(set.intersection(*held) if held else set(), default=NO_TAG)


def _content(blob: Blob) -> bytes:
    return os.pread(blob.fd, blob.size, 0)


def _blob(data: bytes, version: int = 0) -> Blob:
    fd = os.memfd_create("leto-restored", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return Blob(fd, len(data), version)


async def _all(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results, once everything has ended. Raises one Damaged for all that are, else the first error."""
    ends = await asyncio.gather(*work, return_exceptions=True)
    damaged = [end for end in ends if isinstance(end, Damaged)]
    if damaged:
        raise Damaged("; ".join(map(str, damaged)), [rank for end in damaged for rank in end.ranks])
    results: list[T] = []
    for end in ends:
        if isinstance(end, BaseException):
            raise end
        results.append(end)
    return results
