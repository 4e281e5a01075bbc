"""Keepers of a small job, all in this process, on loopback, with ranks that are nothing but segments."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.engines import open_engine
from leto_elastic.protect.keeper import Keeper
from leto_elastic.protect.matrix import Code
from leto_elastic.protect.placement import Placement, Seat, place, place_local
from leto_elastic.protect.world import PeerAddress, World
from leto_elastic.state.header import Header, Phase, Position
from leto_elastic.state.layout import Manifest, Place, encode

KEY = bytes(range(32))
DEADLINE = 20.0  # seconds for anything that must happen
EXTRAS = 4096
ENGINE = open_engine("auto")

Event = tuple[str, dict[str, object]]


def until(ready: Callable[[], bool]) -> None:
    """Wait for what nothing tells."""
    deadline = time.monotonic() + DEADLINE
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


class Mail:
    """What callbacks said, to be waited for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lost: list[tuple[int, str, float]] = []
        self.changed = threading.Condition()

    def on_event(self, name: str, fields: dict[str, object]) -> None:
        with self.changed:
            self.events.append((name, fields))
            self.changed.notify_all()

    def on_lost(self, position: int, reason: str) -> None:
        with self.changed:
            self.lost.append((position, reason, time.monotonic()))
            self.changed.notify_all()

    def named(self, name: str) -> list[dict[str, object]]:
        with self.changed:
            return [fields for event, fields in self.events if event == name]

    def wait(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, DEADLINE), (self.events, self.lost)

    def wait_a_moment(self) -> bool:
        """Whether an attempt ends within a tenth of a second."""
        with self.changed:
            return self.changed.wait_for(lambda: bool(self.ended()), 0.1)

    def outcome(self, count: int = 1) -> list[Event]:
        """The first attempts that have ended."""
        self.wait(lambda: len(self.ended()) >= count)
        return self.ended()[:count]

    def ended(self) -> list[Event]:
        return [event for event in list(self.events) if event[0] in ("protected", "given_up")]


class Proxy:
    """Between a keeper and those that connect to it: flips a byte, or stops passing bytes on.

    Args:
        flip: offset, among all bytes to the keeper, of a byte to flip.
        flip_back: the same for the bytes from it.
        stall: stop after so many bytes to the keeper.
    """

    def __init__(self, flip: int | None = None, flip_back: int | None = None, stall: int | None = None) -> None:
        self.flips = {True: flip, False: flip_back}
        self.stall = stall
        self.stalled, self.go = threading.Event(), threading.Event()
        self.passed = {True: 0, False: 0}
        self.connections = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def start(self, target: PeerAddress) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(self._server)
        self.address = PeerAddress(target.node, *self._server.getsockname())
        self._spawn(self._accept)

    def close(self) -> None:
        self.go.set()
        self.cut()
        for thread in self._threads:
            thread.join(DEADLINE)
        for sock in self._sockets:
            sock.close()

    def cut(self) -> None:
        """End everything."""
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target[1:])
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._sockets += [near, far]
            self._spawn(self._pump, near, far, True)
            self._spawn(self._pump, far, near, False)

    def _pump(self, source: socket.socket, target: socket.socket, there: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                with self._lock:
                    before = self.passed[there]
                    self.passed[there] += len(data)
                at = self.flips[there]
                if at is not None and before <= at < before + len(data):
                    data[at - before] ^= 1
                if there and self.stall is not None and before + len(data) > self.stall and not self.go.is_set():
                    self.stalled.set()
                    assert self.go.wait(DEADLINE)
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Rank:
    """The segments of one rank: two ranges of weights, one of an optimizer, X and its copies."""

    def __init__(self, size: int, seed: int = 0, replicas: Sequence[int] = (), buffers: int = 1) -> None:
        first = size // 3
        second = (size - first) // 2
        third = size - first - second
        self.size = size
        sizes = {"weights": 256 + first + second, "optim": 64 + third, "extras": 3 * EXTRAS, "header": 4096}
        behind = -(-size // 64) * 64
        snapshots = [f"snapshot-{index}" for index in range(buffers)]
        sizes |= dict.fromkeys(snapshots, behind + EXTRAS)
        self.fds = {name: os.memfd_create(name) for name in sizes}
        for name, length in sizes.items():
            os.truncate(self.fds[name], max(1, length))
        self.stream = [
            Place("weights", 64, first),
            Place("weights", 128 + first, second),
            Place("optim", 0, third),
        ]
        names = [name for name in sizes if name != "header"]
        self.manifest = Manifest(
            format=1, version=1, since=1, names=[], group_sizes=[], weights=[], buffers=[], optim=[], grads=[],
            chunks=[], settled=[], elementwise=True, extras="extras", extras_capacity=EXTRAS, undo="", buckets="",
            segments=names, sizes=[sizes[name] for name in names], stream=self.stream, snapshots=snapshots,
            replicas=list(replicas),
        )  # fmt: skip
        self.header = Header(self.fds["header"])
        self.header.initialise()
        self.fill(seed)

    def fill(self, seed: int) -> None:
        self.put(np.random.default_rng(seed).integers(0, 256, self.size, dtype=np.uint8).tobytes())

    def put(self, data: bytes) -> None:
        for part in self.stream:
            os.pwrite(self.fds[part.segment], data[: part.size], part.offset)
            data = data[part.size :]

    def get(self) -> bytes:
        return b"".join(os.pread(self.fds[part.segment], part.size, part.offset) for part in self.stream)

    def flip(self, at: int) -> None:
        data = bytearray(self.get())
        data[at] ^= 1
        self.put(bytes(data))

    def write_extras(self, slot: int, data: bytes) -> None:
        os.pwrite(self.fds["extras"], struct.pack("<QI4x", len(data), zlib.crc32(data)) + data, slot * EXTRAS)

    def write_snapshot(self, buffer: int, data: bytes, extras: bytes) -> None:
        fd = self.fds[f"snapshot-{buffer}"]
        os.pwrite(fd, data, 0)
        prefix = struct.pack("<QI4x", len(extras), zlib.crc32(extras))
        os.pwrite(fd, prefix + extras, -(-self.size // 64) * 64)

    def at(self, step: int, phase: Phase = Phase.COMPUTE) -> None:
        self.header.position = Position(step, phase)

    def close(self) -> None:
        self.header.close()
        for fd in self.fds.values():
            os.close(fd)


@dataclass
class Node:
    """A keeper and its ranks."""

    name: str
    keeper: Keeper
    address: PeerAddress
    mail: Mail
    ranks: dict[int, Rank] = field(default_factory=dict)


class Job:
    """Nodes at positions, which may be lost and replaced."""

    def __init__(self, counts: Sequence[int], code: tuple[int, int] | None, local: bool = False) -> None:
        self.seats: list[Seat] = []
        first = 0
        for position, count in enumerate(counts):
            self.seats.append(Seat(position, f"rack{position}", tuple(range(first, first + count))))
            first += count
        self.positions = {rank: seat.position for seat in self.seats for rank in seat.ranks}
        self.code = Code(*code) if code else None
        self.placement: Placement | None = place(self.seats, *code) if code else None
        self.local = local
        self.nodes: dict[int, Node] = {}
        self.epoch = self.generation = 0
        self.named = 0
        self.limit = 1 << 30
        self.deadline = DEADLINE
        self.via: dict[int, PeerAddress] = {}  # positions that others reach by another address

    def start(self, position: int) -> Node:
        mail = Mail()
        name = f"node-{self.named}"
        self.named += 1
        keeper = Keeper(
            "job", name, KEY, "127.0.0.1", engine=ENGINE, limit=self.limit, on_lost=mail.on_lost,
            on_event=mail.on_event, deadline=self.deadline,
        )  # fmt: skip
        node = self.nodes[position] = Node(name, keeper, PeerAddress(name, *keeper.start()), mail)
        return node

    def world(self, position: int) -> World:
        peers = {p: self.via.get(p, node.address) for p, node in self.nodes.items() if p != position}
        local = place_local(self.seats[position]) if self.local else None
        return World(self.generation, self.epoch, position, peers, self.placement, local, self.code, self.positions)

    def configure(self) -> None:
        for position, node in self.nodes.items():
            node.keeper.configure(self.world(position))

    def attach(self, rank: int, segments: Rank) -> None:
        node = self.node_of(rank)
        node.ranks[rank] = segments
        node.keeper.attach(rank, segments.manifest, segments.fds)

    def node_of(self, rank: int) -> Node:
        return self.nodes[self.positions[rank]]

    def of(self, rank: int) -> Rank:
        return self.node_of(rank).ranks[rank]

    def protect(self, tag: int, step: int, agreed: int = -1, only: Sequence[int] | None = None) -> list[Event]:
        """An attempt from W by every rank; how they ended."""
        ranks = list(self.positions) if only is None else only
        before = {
            p: len([e for e in n.mail.events if e[0] in ("protected", "given_up")]) for p, n in self.nodes.items()
        }
        for rank in ranks:
            segments = self.of(rank)
            segments.write_extras(step % 3, f"X({step}) of {rank}".encode())
            segments.at(step)
            self.node_of(rank).keeper.protect(rank, tag, buffer=-1, slot=step % 3, agreed=agreed)
        ended = []
        for position, node in self.nodes.items():
            mine = sum(self.positions[rank] == position for rank in ranks)
            ended += node.mail.outcome(before[position] + mine)[before[position] :]
        return ended

    def lose(self, position: int) -> Node:
        """A node is gone, without a word; another one takes its place. Returns the lost one."""
        old = self.nodes.pop(position)
        self.start(position)
        return old

    def recover(self, lost: Sequence[int], version: int, tag: int) -> None:
        """Everything that agents do at a plan that lost the memory of these ranks: they are rebuilt."""
        gone = {self.positions[rank] for rank in lost}
        self.epoch += 1
        self.configure()
        for rank in self.positions:
            if rank not in lost:
                self.node_of(rank).keeper.serve(rank, version)
        sources = [position for position in self.nodes if position not in gone]
        errors: list[BaseException] = []

        def rebuild(rank: int) -> None:
            try:
                keeper = self.node_of(rank).keeper
                keeper.rebuild(rank, version, epoch=self.epoch, tag=tag, lost=lost, sources=sources)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

        threads = [threading.Thread(target=rebuild, args=(rank,)) for rank in lost]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        for node in self.nodes.values():
            node.keeper.close()
        for node in self.nodes.values():
            for segments in node.ranks.values():
                segments.close()


def bury(node: Node) -> None:
    """Close what a lost node had; the job has replaced it before."""
    node.keeper.close()
    for segments in node.ranks.values():
        segments.close()


@contextmanager
def job(
    counts: Sequence[int],
    code: tuple[int, int] | None,
    sizes: Sequence[int] | None = None,
    *,
    local: bool = False,
    replicas: Sequence[Sequence[int]] = (),
    proxies: Mapping[int, Proxy] | None = None,
    limit: int = 1 << 30,
    deadline: float = DEADLINE,
) -> Iterator[Job]:
    """Keepers with ranks of these sizes, configured.

    `replicas`: groups of ranks that are equal; `proxies`: what the others reach a position through.
    """
    made = Job(counts, code, local)
    made.limit, made.deadline = limit, deadline
    for position in range(len(counts)):
        made.start(position)
    for position, proxy in (proxies or {}).items():
        proxy.start(made.nodes[position].address)
        made.via[position] = proxy.address
    group = {rank: members for members in replicas for rank in members}
    for rank in made.positions:
        members = group.get(rank, ())
        size = sizes[rank % len(sizes)] if sizes else 300_000
        made.attach(rank, Rank(size, seed=min(members, default=rank), replicas=members))
    made.configure()
    try:
        yield made
    finally:
        for proxy in (proxies or {}).values():
            proxy.close()
        made.close()


def copies(made: Job) -> None:
    """Publish what set-up publishes."""
    for rank in made.positions:
        keeper = made.node_of(rank).keeper
        keeper.publish(rank, "record", 0, f"record {rank}".encode())
        keeper.publish(rank, "manifest", 1, encode(made.of(rank).manifest))


def pieces_of(node: Node) -> Iterator[Bytes]:
    """The memory of the parity that a node holds, to be tampered with."""
    for shelf in node.keeper._pieces._shelves.values():
        for piece in shelf.pieces.values():
            yield piece.data
