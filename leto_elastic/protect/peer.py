"""A keeper's own connection to another one: it sends parity and copies over it, and it learns from it that a node died.

A connection that ends says nothing yet: a frame may have been damaged, a firewall may have forgotten it. So it is made
again at once. If the other side's kernel answers that nobody listens there any more, or another node does, the process
is dead for certain and `on_lost` is called; if it works, nothing has happened; if there is no answer, the node's lease
will tell. A peer that never answered is never reported.

Requests are answered in order. They are queued, so nobody waits here for a slow peer; whoever queues much bounds it by
the answers that he waits for.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.frames import ANSWERS, REQUEST, Closed, Connection, ProtocolError
from leto_elastic.protect.handshake import Identity, WrongNode, introduce
from leto_elastic.protect.messages import Answer, Message
from leto_elastic.protect.world import Disconnected, PeerAddress

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between attempts, doubling
_FIRST, _DYING, _DYING_PAUSE = (
    1,
    50,
    0.01,
)  # tries, and seconds between them: a process that is being torn down resets connections until its port is closed

OnAnswer = Callable[[Answer | None], None]
"""Called from a keeper's thread with the answer, or None when the connection ended before it."""

_BROKEN = (Closed, ProtocolError, OSError)


class _Item(NamedTuple):
    message: Message
    payload: Bytes | bytes
    crc: int | None
    on_answer: OnAnswer
    slot: object | None


class _Session:
    """One connection's worth of requests."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.queue: deque[_Item] = deque()
        self.pending: deque[_Item] = deque()
        self.answered = False


def dial(address: PeerAddress, me: Identity, on_socket: Callable[[Connection], None] = lambda _: None) -> Connection:
    """A connection to a peer that both sides have proved themselves on.

    Raises OSError, Closed, ProtocolError or WrongNode.
    """
    family, kind, protocol, _, name = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    connection = Connection(socket.socket(family, kind, protocol))
    try:
        on_socket(connection)
        connection.connect(name, me.deadline)
        introduce(connection, me, address.node)
    except BaseException:  # boundary: closed, then raised
        connection.close()
        raise
    return connection


class Peer:
    """Another node's keeper.

    Args:
        address: node and where it listens.
        me: who we are.
        on_connected: called at each new connection.
        on_lost: called once with a reason when the peer is dead for certain.
    """

    def __init__(
        self,
        address: PeerAddress,
        me: Identity,
        on_connected: Callable[[Peer], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.address = address
        self._me = me
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._session: _Session | None = None
        self._dialling: Connection | None = None
        self._closed = False
        self.left = False  # it said that it would close
        self._writer: threading.Thread | None = None
        self._reader = threading.Thread(target=self._run, name=f"leto-peer-{address.node}", daemon=True)
        self._reader.start()

    @property
    def connected(self) -> bool:
        return self._session is not None

    @property
    def alive(self) -> bool:
        """Whether it still tries."""
        return self._reader.is_alive()

    def call(
        self,
        message: Message,
        payload: Bytes | bytes = b"",
        *,
        on_answer: OnAnswer,
        crc: int | None = None,
        slot: object | None = None,
    ) -> None:
        """Queue a request. One that still waits in the same `slot` is replaced, and never answered.

        Raises Disconnected when there is no connection now.
        """
        item = _Item(message, payload, crc, on_answer, slot)
        with self._changed:
            if self._session is None:
                raise Disconnected(f"no connection to node {self.address.node}")
            queue = self._session.queue
            if slot is not None:
                self._session.queue = queue = deque(other for other in queue if other.slot != slot)
            queue.append(item)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name=f"leto-send-{self.address.node}", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def hang_up(self) -> None:
        """End the connection, without waiting for the threads. Nothing is reported any more."""
        with self._changed:
            self._closed = True
            for connection in (self._dialling, self._session.connection if self._session else None):
                if connection is not None:
                    connection.interrupt()
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """After `hang_up`: wait for the threads."""
        for thread in (self._reader, self._writer):
            if thread is not None and thread is not threading.current_thread():
                thread.join(seconds)

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        broke = ""  # why the last connection ended; "" before there was one
        connection, gone = self._dial(_FIRST)
        while not self._over():
            if connection is not None:
                broke, answered = self._serve(connection)
                connection, gone = self._dial(_DYING)
                pause = _FIRST_PAUSE if answered else min(2 * pause, _LONGEST_PAUSE)
                if connection is not None and not answered:
                    self._sleep(pause)  # it works, and yet nothing comes of it
            elif gone and broke:
                self._on_lost(f"{broke}; then: {gone}")
                return
            else:
                self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                connection, gone = self._dial(_FIRST)
        if connection is not None:
            connection.close()

    def _dial(self, tries: int) -> tuple[Connection | None, str]:
        """Connect; when that fails, the proof that nobody is there, "" for none."""
        for _ in range(tries):
            try:
                return dial(self.address, self._me, self._note), ""
            except (ConnectionRefusedError, WrongNode) as error:
                return None, str(error)
            except (ConnectionResetError, BrokenPipeError, Closed):
                self._sleep(_DYING_PAUSE)
            except (ProtocolError, OSError):
                return None, ""
            finally:
                self._dialling = None
            if self._over():
                break
        return None, ""

    def _over(self) -> bool:
        return self._closed or self.left

    def _note(self, connection: Connection) -> None:
        with self._changed:
            self._dialling = connection
            if self._closed:
                raise Closed("this keeper closes")

    def _serve(self, connection: Connection) -> tuple[str, bool]:
        """Until the connection ends; returns why, and whether anything was ever answered on it."""
        session = _Session(connection)
        with self._changed:
            if self._closed:
                connection.close()
                return "closed", True
            self._session = session
            self._changed.notify_all()
        self._on_connected(self)
        try:
            while True:
                answer, _ = connection.receive(ANSWERS)
                with self._changed:
                    item = session.pending.popleft() if session.pending else None
                if item is None:
                    raise ProtocolError("an answer that nothing was asked for")
                session.answered = True
                item.on_answer(answer)
        except _BROKEN as error:
            reason = str(error)
        with self._changed:
            self._session = None
            unanswered = [*session.pending, *session.queue]
            session.queue.clear()
            self._changed.notify_all()
        connection.interrupt()
        for item in unanswered:
            item.on_answer(None)
        connection.close()
        return reason, session.answered

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._session is None or not self._session.queue):
                    self._changed.wait()
                session = self._session
                if self._closed or session is None:
                    return
                item = session.queue.popleft()
                session.pending.append(item)
            try:
                session.connection.send(REQUEST, item.message, item.payload, item.crc)
            except (OSError, ProtocolError):
                session.connection.interrupt()  # the reader tells

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            if not self._closed:
                self._changed.wait(seconds)
