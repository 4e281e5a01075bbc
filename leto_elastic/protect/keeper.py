"""The keeper: the part of an agent that protects its ranks' memory at other nodes, and theirs here.

It lives in the agent's process, in threads of its own. The methods marked *blocking* are for an executor; the others
only note what is to be done and return at once. Callbacks come from the keeper's threads.

What is guaranteed: a piece or a copy that is handed out has just matched its checksum, and a rebuilt stream the sums of
its owner. A version is reported as sent only when all of it lies at its keepers. What comes from a network is checked
against the world before use, never unpickled, and bounded by `limit`. See `leto_elastic.protect.frames` for what is
rejected, and for what is not protected on the wire.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from leto_elastic.protect import copies as small
from leto_elastic.protect.budget import Budget
from leto_elastic.protect.copies import Copies, Key
from leto_elastic.protect.desk import Desk, Local
from leto_elastic.protect.engines import Engine
from leto_elastic.protect.handshake import Identity
from leto_elastic.protect.mapped import Slot
from leto_elastic.protect.messages import COPY_MAX, Answer, Bye, Fetch, Kind, Put, Refused
from leto_elastic.protect.peer import Peer
from leto_elastic.protect.reading import fetch
from leto_elastic.protect.rebuild import Loss, Rebuilder
from leto_elastic.protect.sender import Attempt, Protector, View
from leto_elastic.protect.server import Server
from leto_elastic.protect.store import Pieces
from leto_elastic.protect.sums import unpack
from leto_elastic.protect.world import CannotRebuild, Disconnected, Holdings, PeerAddress, PieceKey, Refusal, World
from leto_elastic.state.header import NO_TAG, version_of
from leto_elastic.state.layout import Manifest

_WAY = 5.0  # seconds that an answer gets on top of what the other side may wait
_GOODBYE = 0.5  # seconds that all peers together get to hear it
_JOIN = 1.0  # seconds for a thread to end on top of what a handshake may take


class Keeper:
    """See the module.

    Args:
        run_id: of the job.
        node: id of this node, as it stands in the other nodes' worlds.
        key: the job's, 32 bytes.
        address: an address of this host to listen on.
        engine: what multiplies.
        limit: bytes that may be held for other nodes and for the local tier.
        on_lost: called with position and reason when the process of a peer is dead for certain.
        on_event: called with "protected", "given_up", "damaged" or "refused", and fields.
        deadline: seconds that a request waits here for a plan or a version; a source may be silent a little longer.
        connect: seconds for a connection to another keeper to be made, and for its handshake.
    """

    def __init__(
        self,
        run_id: str,
        node: str,
        key: bytes,
        address: str,
        *,
        engine: Engine,
        limit: int,
        on_lost: Callable[[int, str], None],
        on_event: Callable[[str, dict[str, object]], None],
        deadline: float = 30.0,
        connect: float = 5.0,
    ) -> None:
        self._me = Identity(run_id, node, key, connect)
        self._address = address
        self._silence = deadline + _WAY
        self._on_lost = on_lost
        self._on_event = on_event
        self._local = Local()
        self._copies = Copies(budget := Budget(limit))
        self._own = Copies(Budget())
        self._pieces = Pieces(engine, budget, self._piece_damaged)
        self._desk = Desk(
            self._local,
            self._pieces,
            self._copies,
            self._own,
            deadline=deadline,
            on_damaged=self._state_damaged,
            on_bye=self._said_bye,
        )
        self._rebuilder = Rebuilder(self._me, self._desk, self._pieces, engine, self._silence)
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._peers: dict[int, Peer] = {}
        self._former: list[Peer] = []
        self._protectors: dict[int, Protector] = {}
        self._ended: list[Protector] = []

    def start(self) -> tuple[str, int]:
        """Listen; returns host and port. Raises OSError."""
        self._server = Server(self._address, self._me, self._desk.answer)
        return self._server.host, self._server.port

    def close(self) -> None:
        """Say goodbye, so that nobody takes this for a death, and end all threads. *Blocking*, a second at most unless
        a peer is just being connected to.
        """
        with self._local.changed:
            self._local.closed = True
            self._local.changed.notify_all()
        with self._lock:
            peers = [*self._peers.values(), *self._former]
            protectors = [*self._protectors.values(), *self._ended]
        for protector in protectors:
            protector.stop()
        self._say_bye(peers)
        for peer in peers:
            peer.hang_up()
        server, self._server = self._server, None
        patience = self._me.deadline + _JOIN
        if server is not None:
            server.close(patience)
        for peer in peers:
            peer.join(patience)
        for protector in protectors:
            protector.join(patience)
        with self._local.changed:
            self._local.slots.clear()

    def configure(self, world: World) -> None:
        """The job as of a plan. Attempts of before are given up, ranks that stood still need not any more.

        Peers whose node is another one now are new; those that are missing are dropped.
        """
        with self._local.changed:
            former, self._local.world = self._local.world, world
            self._local.served.clear()
            self._local.changed.notify_all()
        with self._lock:
            for protector in self._protectors.values():
                protector.cancel("there is a new plan")
            for position, peer in list(self._peers.items()):
                if world.peers.get(position) != peer.address:
                    peer.hang_up()
                    self._former.append(self._peers.pop(position))
            self._former = [peer for peer in self._former if peer.alive]
            same = former is not None and former.placement == world.placement
            known = [] if same else list(self._peers.items())
            for position, address in world.peers.items():
                if position not in self._peers:
                    self._peers[position] = self._connect(position, address)
        for position, peer in known:
            self._send_copies(position, peer)

    def attach(self, rank: int, manifest: Manifest, fds: Mapping[str, int]) -> None:
        """The segments of a local rank, its header ("header") among them, or those of a newer manifest.

        Raises StateError when they do not fit the manifest.
        """
        slot = Slot(manifest, fds)
        with self._local.changed:
            self._local.slots[rank] = slot
        with self._lock:
            protector = self._protectors.get(rank)
            if protector is None:
                self._protectors[rank] = Protector(rank, self._view, self._pieces, self._own, self._on_event)
            else:
                protector.cancel("the layout has changed")

    def detach(self, rank: int) -> None:
        """Forget the segments of a local rank; copies of its records are kept."""
        with self._local.changed:
            self._local.slots.pop(rank, None)
            self._local.served.pop(rank, None)
        with self._lock:
            protector = self._protectors.pop(rank, None)
            if protector is not None:
                protector.stop()
                self._ended = [one for one in self._ended if one.alive] + [protector]

    def publish(self, rank: int, kind: Kind, version: int, data: bytes) -> None:
        """Keep a small copy of a local rank at its keepers, now and whenever one of them is new.

        Raises Refusal when it is larger than `COPY_MAX`.
        """
        if len(data) > COPY_MAX:
            raise Refusal(f"the {kind} of rank {rank} has {len(data)} bytes, more than {COPY_MAX}")
        key = Key(kind, version)
        self._own.put(rank, key, data)
        world = self._local.world
        if world is None:
            return
        for position in world.keepers_of(rank):
            with self._lock:
                peer = self._peers.get(position)
            if peer is not None:
                self._put(peer, world, rank, key, data, NO_TAG)

    def protect(self, rank: int, tag: int, *, buffer: int, slot: int, agreed: int) -> None:
        """Start an attempt; one of the same rank that still runs is given up. Ends with "protected" or "given_up".

        Args:
            rank: a local rank.
            tag: the version.
            buffer: where it is: W (-1) or a snapshot buffer.
            slot: of the extras that holds its X, when it is in W.
            agreed: what the header says.
        """
        with self._lock:
            protector = self._protectors.get(rank)
        if protector is None:
            fields = {"rank": rank, "version": version_of(tag), "reason": "the rank has no segments here"}
            self._on_event("given_up", fields)
            return
        protector.request(Attempt(rank, tag, buffer, slot, agreed))

    def holdings(self) -> Holdings:
        """What is whole here now; verifies all checksums. *Blocking*. Damaged pieces are dropped ("damaged")."""
        keys = self._copies.keys() + self._own.keys()
        return Holdings(
            pieces=[(tag, key.stripe, key.piece) for key, tag in self._pieces.complete()],
            extras=small.versions(keys),
            protected=small.protected(keys),
            records=sorted({(rank, key.kind) for rank, key in keys if key.kind in ("record", "manifest")}),
        )

    def verify(self, rank: int, tag: int, buffer: int = -1) -> list[int]:
        """Parts of a local rank's stream, in W or a snapshot buffer, that do not match the sums of a tag. *Blocking*.

        Raises Refusal when the sums, or the rank, are not known here; StateError for a buffer that does not exist.
        """
        slot = self._slot(rank)
        data = self._own.get(rank, Key("sums", tag, tag))
        if data is None:
            raise Refusal(f"the sums of rank {rank} at tag {tag} are not known here")
        expected = unpack(data)
        found = slot.source(buffer).sums(len(expected))
        return [part for part, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]

    def serve(self, rank: int, version: int | None) -> None:
        """W of this local rank is at `version` and stays so until the next `configure`, or `serve(rank, None)`."""
        with self._local.changed:
            if version is None:
                self._local.served.pop(rank, None)
            else:
                self._local.served[rank] = version
            self._local.changed.notify_all()

    def fetch(self, rank: int, kind: Kind, version: int, sources: Iterable[int], tag: int = NO_TAG) -> bytes:
        """A small copy, from here or the first of these positions that has it. *Blocking*.

        X is found by its version, or by the tag of a protected one; sums by their tag (then `version` is the tag too);
        there is one record and one manifest. Raises CannotRebuild.
        """
        key = Key(kind, version, tag)
        here = self._desk.copy(rank, key)
        if here is not None:
            return here
        world = self._world()
        reasons = []
        first = set(world.keepers_of(rank))
        for position in sorted(sources, key=lambda p: (p not in first, p)):
            address = world.peers.get(position)
            if address is None:
                continue
            try:
                return fetch(address, self._me, Fetch(world.epoch, rank, kind, version, tag), self._silence)
            except (Refusal, Disconnected) as error:
                reasons.append(str(error))
        what = f"the {kind} of rank {rank}" + (f" at version {version}" if kind == "extras" else "")
        raise CannotRebuild(f"{what} cannot be had: {'; '.join(reasons) or 'nobody to ask is left'}")

    def answers(self, position: int, seconds: float) -> bool:
        """Whether the keeper at a position can be reached and answers anything within so long. *Blocking*."""
        world = self._local.world
        address = world.peers.get(position) if world is not None else None
        if world is None or address is None:
            return False
        try:
            fetch(address, self._me, Fetch(0, 0, "sums", 0, 0), seconds)
        except Refusal:
            pass
        except Disconnected:
            return False
        return True

    def rebuild(
        self, rank: int, version: int, *, epoch: int, tag: int, lost: Collection[int], sources: Collection[int]
    ) -> None:
        """Fill the stream of an attached local rank whose memory was lost. *Blocking*; several at once are fine.

        Args:
            rank: attached, with the manifest that it had at the version.
            version: what W is to be at.
            epoch: that was decided in. In a later one nobody stands at that version before this node has said where it
                stands, so what is under way fails as soon as there is a plan for one.
            tag: the protected version that it is decoded from; `NO_TAG`: only a replica will do.
            lost: all ranks whose memory is gone; they are not asked.
            sources: positions of nodes that were there before.

        Raises:
            CannotRebuild: with what each source said.
            Refusal: the rank is not attached, or the epoch is not the present one.
        """
        world, slot = self._world(), self._slot(rank)
        if world.epoch != epoch:
            raise Refusal(f"epoch {epoch} is over, this is epoch {world.epoch}")
        sums = None
        if tag != NO_TAG:
            data = self.fetch(rank, "sums", tag, sources, tag)
            sums = unpack(data)
            self._own.put(rank, Key("sums", tag, tag), data)
        self._rebuilder.rebuild(world, slot, Loss(rank, version, tag, lost, sources, sums))

    def _world(self) -> World:
        if self._local.world is None:
            raise Refusal("this keeper has not been told of the job yet")
        return self._local.world

    def _slot(self, rank: int) -> Slot:
        slot = self._local.slots.get(rank)
        if slot is None:
            raise Refusal(f"rank {rank} has no segments here")
        return slot

    def _view(self, rank: int) -> View | None:
        with self._local.changed:
            world, slot = self._local.world, self._local.slots.get(rank)
        with self._lock:
            peers = dict(self._peers)
        return View(world, slot, peers) if world is not None and slot is not None else None

    def _connect(self, position: int, address: PeerAddress) -> Peer:
        return Peer(
            address,
            self._me,
            lambda peer: self._send_copies(position, peer),
            lambda reason: self._peer_lost(position, address, reason),
        )

    def _peer_lost(self, position: int, address: PeerAddress, reason: str) -> None:
        """Of no effect when another node has the position by now."""
        world = self._local.world
        if world is not None and world.peers.get(position) == address:
            self._on_lost(position, reason)

    def _send_copies(self, position: int, peer: Peer) -> None:
        """All small copies that the node at this position should have of our ranks."""
        world = self._local.world
        if world is None:
            return
        for rank in self._own.ranks():
            if position in world.keepers_of(rank):
                for key, data, agreed in self._own.of(rank):
                    self._put(peer, world, rank, key, data, agreed)

    def _put(self, peer: Peer, world: World, rank: int, key: Key, data: bytes, agreed: int) -> None:
        def on_answer(answer: Answer | None) -> None:
            if isinstance(answer, Refused):
                self._on_event("refused", {"rank": rank, "kind": key.kind, "reason": answer.reason})

        message = Put(world.epoch, rank, key.kind, key.version, key.tag, agreed)
        slot = (rank, key.kind, key.tag, key.version % 2)
        with contextlib.suppress(Disconnected):  # it gets all of them when it is connected
            peer.call(message, data, on_answer=on_answer, slot=slot)

    def _say_bye(self, peers: list[Peer]) -> None:
        heard = threading.Semaphore(0)
        told = 0
        for peer in peers:
            with contextlib.suppress(Disconnected):
                peer.call(Bye(), on_answer=lambda _: heard.release())
                told += 1
        deadline = time.monotonic() + _GOODBYE
        for _ in range(told):
            heard.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _said_bye(self, node: str) -> None:
        with self._lock:
            for peer in self._peers.values():
                if peer.address.node == node:
                    peer.left = True

    def _piece_damaged(self, key: PieceKey, tag: int) -> None:
        self._on_event("damaged", {"version": version_of(tag), "stripe": key.stripe, "piece": key.piece})

    def _state_damaged(self, rank: int, tag: int, part: int) -> None:
        self._on_event("damaged", {"version": version_of(tag), "rank": rank, "part": part})
