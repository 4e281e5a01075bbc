"""A job whose nodes may be lost, as its memory tells it: what is written where, byte by byte and store by store.

The decisions are the real ones: what trainers keep (`worker.protection`), put back and hold (`protect.putback`), which
small copies keepers retain (`protect.copies`), where parity lies, what is chosen and resolved. Around them is as little
as possible: a chunk is one byte whose value is the version it belongs to, so that a mixture of versions can be seen,
and a parity piece is the list of what it was made from. Trainers, agents and the recovery are generators, which may be
stopped for ever between any two stores.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from leto_elastic import wire
from leto_elastic.errors import StateError
from leto_elastic.protect import copies as small
from leto_elastic.protect import putback
from leto_elastic.protect.budget import Budget, age, later
from leto_elastic.protect.copies import Copies, Key
from leto_elastic.protect.mapped import Stream
from leto_elastic.protect.placement import Placement, Seat, place
from leto_elastic.recovery.choice import Choice, NodeStanding, Rebuild, SlotStanding, choose
from leto_elastic.recovery.resolution import Resolution, resolve
from leto_elastic.state import layout, snapshot
from leto_elastic.state.header import NO_TAG, Phase, Position, generation_of, tag_of, version_of
from leto_elastic.worker.protection import Protection, Words, words_of

CHUNKS, TORN = 2, 255
FOREVER = 1 << 30
MANIFEST = layout.Manifest(
    format=1, version=1, since=0, names=[], group_sizes=[], weights=[], buffers=[], optim=[], grads=[],
    chunks=[layout.Chunk(0, i, i + 1, [layout.Place("w", i, 1)]) for i in range(CHUNKS)],
    settled=[], elementwise=True, extras="", extras_capacity=1, undo="", buckets="", segments=["w"],
    stream=[layout.Place("w", 0, CHUNKS)],
)  # fmt: skip

Moves = Generator[str, None, None]
"""Stops between two stores; "blocked" while it waits for others, "at rest" where an abort finds a trainer."""


@dataclass
class Store:
    """A header without its segment."""

    position: Position
    sent: int = NO_TAG
    agreed: int = NO_TAG
    buffers: tuple[int, int] = (NO_TAG, NO_TAG)
    target: tuple[int, int] = (NO_TAG, 0)

    def set_buffer(self, index: int, tag: int) -> None:
        self.buffers = (tag, self.buffers[1]) if index == 0 else (self.buffers[0], tag)


class Memory:
    """The segments of a rank; looks to `putback` like its slot."""

    def __init__(self, buffers: int) -> None:
        self.header = Store(Position(0, Phase.SETUP))
        self.manifest = MANIFEST
        self.cells = np.zeros(CHUNKS, dtype=np.uint8)
        self.undo = 0
        self.weights = Stream([self.cells])
        self.snapshots = [Stream([np.full(CHUNKS, TORN, dtype=np.uint8)]) for _ in range(buffers)]
        self.x: dict[tuple[int, int], int] = {}

    def source(self, buffer: int) -> Stream:
        return self.weights if buffer == -1 else self.snapshots[buffer]

    def extras(self, buffer: int, slot: int) -> bytes:
        return bytes([self.x[buffer, slot if buffer == -1 else 0]])

    def write_extras(self, buffer: int, slot: int, data: bytes) -> None:
        self.x[buffer, slot] = data[0]

    def bytes_of(self, buffer: int) -> list[int]:
        return [int(value) for view in self.source(buffer).views(0, CHUNKS) for value in view]

    def hold(self, chunk: int, buffer: int | None) -> None:
        """Keep the pre-image of a chunk."""
        if buffer is None:
            self.undo = int(self.cells[chunk])
        else:
            self.snapshots[buffer].write(chunk, self.cells[chunk : chunk + 1])

    def put_back(self, chunk: int, buffer: int | None) -> None:
        self.cells[chunk] = self.undo if buffer is None else self.bytes_of(buffer)[chunk]


@dataclass
class Piece:
    """A parity piece: what its units were."""

    units: dict[int, list[int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


@dataclass
class Shelf:
    """The versions of a piece that a keeper holds, by the rule of `protect.store`."""

    pieces: dict[int, Piece] = field(default_factory=dict)
    agreed: int = NO_TAG

    def begin(self, tag: int, agreed: int) -> Piece | None:
        self.agreed = later(self.agreed, agreed)
        if tag not in self.pieces:
            if any(age(tag) < age(old) for old in self.pieces):
                return None
            self.pieces = {old: piece for old, piece in self.pieces.items() if old == self.agreed}
            self.pieces[tag] = Piece()
        return self.pieces[tag]


@dataclass
class Node:
    """What dies with a node."""

    shelves: dict[tuple[int, int], Shelf] = field(default_factory=dict)
    copies: Copies = field(default_factory=lambda: Copies(Budget()))
    own: Copies = field(default_factory=lambda: Copies(Budget()))


class _Link:
    def __init__(self, hear: Any) -> None:
        self.send = hear


@dataclass(frozen=True)
class Setting:
    """A code over `nodes` nodes of one rank each; `replicas`: all ranks are equal."""

    nodes: int = 4
    data: int = 3
    parity: int = 1
    buffers: int = 1
    every: int = 2
    replicas: bool = False


class Over(Exception):
    """More was lost than the code covers."""


class Cluster:
    """The job. Every `move` and `work` ends between two stores."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.ranks = range(setting.nodes)
        self.placement: Placement = place([Seat(p, str(p), (p,)) for p in self.ranks], setting.data, setting.parity)
        self.nodes = [Node() for _ in self.ranks]
        self.memory: dict[int, Memory] = {rank: Memory(setting.buffers) for rank in self.ranks}
        self.lost: set[int] = set()  # ranks whose memory is gone
        self.dead: set[int] = set()  # ranks without a process
        self.epoch = self.generation = 0
        self.broken = False
        self.floor = -1  # the newest version that was ever agreed
        self.exposed: set[int] = set()  # positions lost since a version was agreed
        self.reached = 0
        self.protections: dict[int, Protection] = {}
        self.trainers: dict[int, Moves] = {}
        self.state: dict[int, str] = {}
        self.attempts: dict[int, Moves] = {}
        self.recovery: Iterator[None] | None = None
        self._ballots: dict[int, dict[int, int]] = {}
        for rank, memory in self.memory.items():
            memory.x[-1, 0] = 0
            memory.header.position = Position(0, Phase.COMPUTE)
            self._start(rank, self._life(rank))
            self._protect(rank).ask()

    # ---- trainers

    def _protect(self, rank: int) -> Protection:
        s, header = self.setting, self.memory[rank].header
        link = _Link(lambda message: self._hear(rank, message))
        self.protections[rank] = made = Protection(cast(Any, header), cast(Any, link), s.buffers, s.every, FOREVER)
        made.generation = self.generation
        return made

    def _start(self, rank: int, life: Moves) -> None:
        if rank not in self.protections:
            self._protect(rank)
        self.trainers[rank], self.state[rank] = life, "at rest"

    def move(self, rank: int) -> bool:
        """One move of a trainer; False when it has none."""
        if rank in self.dead or rank in self.lost or (self.broken and self.state[rank] == "at rest"):
            return False
        self.state[rank] = next(self.trainers[rank])
        return self.state[rank] != "blocked"

    def _life(self, rank: int) -> Moves:
        memory, protection = self.memory[rank], self.protections.get(rank) or self._protect(rank)
        header = memory.header
        while True:
            step = header.position.step
            assert memory.bytes_of(-1) == [step] * CHUNKS, f"rank {rank} computes {step} with {memory.bytes_of(-1)}"
            assert memory.x[-1, header.position.slot] == step
            yield "at rest"
            header.position = header.position._replace(phase=Phase.VOTE, torn=False, chunk=0)
            ballots = self._ballots.setdefault(step, {})
            ballots[rank] = protection.ballot(list)
            yield "at rest"
            while len(ballots) < len(self.ranks):
                yield "blocked"
            before = header.agreed
            protection.decide(step, min(ballots.values()))
            if header.agreed > before and generation_of(header.agreed) == self.generation:
                self._agree(header.agreed)
            yield "moving"
            yield from self._update(rank)
            protection.ask()

    def _agree(self, tag: int) -> None:
        if version_of(tag) > self.floor or self.exposed:
            self.floor = max(self.floor, version_of(tag))
            self.exposed.clear()

    def _update(self, rank: int) -> Moves:
        memory, protection = self.memory[rank], self.protections[rank]
        header = memory.header
        if header.position.phase is Phase.VOTE:
            header.position = header.position._replace(phase=Phase.UPDATE, chunk=0, torn=False)
            yield "moving"
        step, slot = header.position.step, header.position.slot
        buffer = snapshot.target_buffer(cast(Any, header), step)
        if buffer is not None:
            memory.x[buffer, 0] = memory.x[-1, slot]
        while (chunk := header.position.chunk) < CHUNKS:
            if header.position.torn:
                memory.put_back(chunk, buffer)
            else:
                memory.hold(chunk, buffer)
                yield "moving"
                header.position = header.position._replace(torn=True)
                yield "moving"
            assert memory.cells[chunk] == step, f"rank {rank} updates {step} with {memory.cells[chunk]}"
            memory.cells[chunk] = TORN
            yield "moving"
            memory.cells[chunk] = step + 1
            header.position = header.position._replace(chunk=chunk + 1, torn=False)
            yield "moving"
        after = (slot + 2) % 3
        memory.x[-1, after] = step + 1
        protection.before_commit(step)
        yield "moving"
        header.position = Position(step + 1, Phase.COMPUTE, slot=after)
        self.reached = max(self.reached, step + 1)
        yield "moving"
        protection.after_commit()

    # ---- agents

    def _hear(self, rank: int, message: wire.Stepped | wire.Due) -> None:
        if isinstance(message, wire.Stepped):
            self._publish(rank, Key("extras", message.step), self.memory[rank].extras(-1, message.slot), NO_TAG)
        else:
            tag = tag_of(message.step, message.generation)
            agreed = self.memory[rank].header.agreed
            self.attempts[rank] = self._attempt(rank, tag, message.buffer, message.slot, agreed)

    def _publish(self, rank: int, key: Key, data: bytes, agreed: int) -> None:
        self.nodes[rank].own.put(rank, key, data, agreed)
        for position in self.placement.keepers_of(rank):
            self.nodes[position].copies.put(rank, key, data, agreed)

    def work(self, rank: int) -> bool:
        """One move of the agent of a rank; False when it has nothing to do."""
        attempt = self.attempts.get(rank)
        if attempt is None or rank in self.lost or next(attempt, "over") == "over":
            self.attempts.pop(rank, None)
            return False
        return True

    def _attempt(self, rank: int, tag: int, buffer: int, slot: int, agreed: int) -> Moves:
        memory, version = self.memory[rank], version_of(tag)

        def is_whole() -> bool:
            position = memory.header.position
            if buffer >= 0:
                return memory.header.buffers[buffer] == tag
            return position.step == version and position.phase in (Phase.COMPUTE, Phase.VOTE)

        if not is_whole():
            return
        self._publish(rank, Key("extras", version, tag), memory.extras(buffer, slot), agreed)
        assert memory.extras(buffer, slot) == bytes([version])
        yield "sending"
        for part in range(0 if self.setting.replicas else self.setting.data):
            stripe = self.placement.stripe_of(rank, part)
            for index, holder in enumerate(stripe.holders):
                shelf = self.nodes[holder].shelves.setdefault((stripe.index, index), Shelf())
                piece = shelf.begin(tag, agreed)
                if piece is None:
                    return
                data = memory.bytes_of(buffer)
                if not is_whole():
                    return
                piece.units[part] = data
                yield "sending"
                if not is_whole() or tag not in shelf.pieces:
                    return
                piece.done.add(part)
                yield "sending"
        self._publish(rank, Key("sums", tag, tag), b"", agreed)
        if not is_whole():
            return
        memory.header.sent = tag
        yield "sending"

    # ---- failures and what follows

    def kill(self, rank: int) -> None:
        """A process ends where it stands; its memory stays."""
        self.dead.add(rank)
        self.broken, self.recovery = True, None

    def lose(self, position: int) -> None:
        """A node ends, with its memory and what it kept for others; a spare takes its place at once."""
        self.kill(position)
        self.lost.add(position)
        self.exposed.add(position)
        self.attempts.pop(position, None)
        self.nodes[position] = Node()

    def recover(self) -> bool:
        """One move of the recovery; False when there is none to do. Raises Over."""
        if not self.broken:
            return False
        if self.recovery is None:
            self.recovery = self._recover()
        next(self.recovery, None)
        return self.broken

    def _recover(self) -> Iterator[None]:
        self._park()
        yield
        standings = [self._standing(position) for position in self.ranks]
        choice = self._choose(standings)
        self.epoch += 1
        if choice.version is not None or self.lost:
            self.generation = self.epoch
        self.attempts.clear()
        for rank, keeper in itertools.product(self.ranks, self.ranks):
            if keeper in self.placement.keepers_of(rank) and keeper in self.lost:
                for key, data, agreed in self.nodes[rank].own.of(rank):
                    self.nodes[keeper].copies.put(rank, key, data, agreed)
        yield
        if choice.version is not None:
            yield from self._restore(choice, choice.version, standings)
        self._join()

    def _park(self) -> None:
        """Every living trainer comes to rest."""
        for rank in self.ranks:
            while rank not in self.dead and self.state[rank] == "moving":
                self.move(rank)

    def _standing(self, position: int) -> NodeStanding:
        node = self.nodes[position]
        keys = node.copies.keys() + node.own.keys()
        pieces = [
            (tag, stripe, index)
            for (stripe, index), shelf in node.shelves.items()
            for tag, piece in shelf.pieces.items()
            if len(piece.done) == sum(unit is not None for unit in self.placement.stripes[stripe].units)
        ]
        slot = SlotStanding(position, True)
        if position not in self.lost:
            header = self.memory[position].header
            replicas = list(self.ranks) if self.setting.replicas else []
            word = header.position.pack()
            slot = SlotStanding(position, False, word, header.buffers, header.target[0], replicas, CHUNKS)
        return NodeStanding(position, [slot], pieces, small.versions(keys), sums=small.protected(keys))

    def _choose(self, standings: list[NodeStanding]) -> Choice:
        covered = self.floor >= 0 and len(self.exposed) <= self.setting.parity
        try:
            choice = choose(standings, self.placement)
        except StateError as error:
            if covered:
                raise AssertionError(f"agreed: {self.floor}, lost since: {self.exposed}") from error
            raise Over from error
        assert choice.version is None or not covered or choice.version >= self.floor, "further back than need be"
        return choice

    def _restore(self, choice: Choice, version: int, standings: Sequence[NodeStanding]) -> Iterator[None]:
        """What `launch.protection` does, slot by slot."""
        held = [set(slot.buffers) for node in standings for slot in node.slots if not slot.lost]
        common = max(set.intersection(*held) if held else set(), default=NO_TAG)
        for rank in self.ranks:
            if rank in choice.rebuild:
                continue
            slot = cast(Any, self.memory[rank])
            source = choice.put_back.get(rank)
            if source is not None:
                putback.put_back(slot, version, source)
                yield
            position = slot.header.position
            if position.step != version or position.phase is Phase.UPDATE:
                continue
            assert self.memory[rank].bytes_of(-1) == [version] * CHUNKS
            putback.forget_after(slot, version)
            if choice.tag != NO_TAG:
                putback.keep(slot, choice.tag)
                yield
        for rank, plan in choice.rebuild.items():
            assert self._read(plan, version, rank) == [version] * CHUNKS, "rebuilt from a mixture"
            self.memory[rank] = memory = Memory(self.setting.buffers)
            self.protections.pop(rank, None)
            yield
            memory.cells[:] = version
            putback.begin(cast(Any, memory), version, bytes([version]))
            if choice.tag != NO_TAG:
                putback.keep(cast(Any, memory), choice.tag)
            else:
                memory.header.agreed = common
            self._publish(rank, Key("extras", version), bytes([version]), NO_TAG)
            self.lost.discard(rank)
            yield

    def _read(self, plan: Rebuild, version: int, rank: int) -> list[int]:
        """The bytes that a rank is rebuilt from; of a stripe those that are not of the version."""
        if plan.replica >= 0:
            return self.memory[plan.replica].bytes_of(-1)
        assert len(plan.parts) == self.setting.data
        for part in plan.parts:
            stripe = self.placement.stripe_of(rank, part.part)
            shards = [self.memory[unit.rank].bytes_of(-1) for i in part.units if (unit := stripe.units[i]) is not None]
            for piece in part.pieces:
                shards += self.nodes[piece.position].shelves[stripe.index, piece.index].pieces[plan.tag].units.values()
            wrong = [shard for shard in shards if shard != [version] * CHUNKS]
            if wrong:
                return wrong[0]
        return [version] * CHUNKS

    def _join(self) -> None:
        """Every rank has a process again; they connect, tell each other their words, and resolve."""
        rows = [words_of(cast(Any, self.memory[rank].header)) for rank in self.ranks]
        resolution = resolve({rank: Position.unpack(row.position) for rank, row in enumerate(rows)})
        self.dead.clear()
        self._ballots.clear()
        self.broken = False
        for rank in self.ranks:
            self._protect(rank)
            self._start(rank, self._resolved(rank, resolution, rows))

    def _resolved(self, rank: int, resolution: Resolution, rows: list[Words]) -> Moves:
        header, protection = self.memory[rank].header, self.protections[rank]
        yield "moving"
        if resolution.action[rank] == "forward":
            if header.position.phase is Phase.VOTE:
                protection.follow(rows)
                yield "moving"
            yield from self._update(rank)
        header.position = Position(resolution.step, Phase.COMPUTE, slot=header.position.slot)
        yield "moving"
        protection.joined()
        protection.ask(again=True)
        yield from self._life(rank)

    def go_on(self, steps: int) -> None:
        """Recover, and train on with agents that keep up, until everyone is so many steps further. Raises Over."""
        while self.recover():
            pass
        until = self.reached + steps
        while min(memory.header.position.step for memory in self.memory.values()) < until:
            for rank in self.ranks:
                while self.work(rank):
                    pass
            moved = [self.move(rank) for rank in self.ranks if self.memory[rank].header.position.step < until]
            assert any(moved), "stuck"
        self._park()
