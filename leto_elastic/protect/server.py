"""The listening side: accepts connections, lets in who has the key, and hands their requests to a desk.

One thread a connection, blocking: what takes time (receiving, coding, checksums) runs without the GIL. A connection
that does anything wrong is closed, with one line in the log at most every `_LOG_EVERY` seconds from one address, and
nothing else happens.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.frames import ANSWER, REQUESTS, Closed, Connection, ProtocolError
from leto_elastic.protect.handshake import Identity, admit
from leto_elastic.protect.messages import CHUNK, Message, Refused, Request
from leto_elastic.protect.world import Refusal

STRANGERS = 64  # connections that have not yet proved themselves, at once
_LOG_EVERY = 10.0  # seconds
_LOGGED = 1024  # addresses remembered for that
_REASON = 2000  # characters of a refusal

logger = logging.getLogger(__name__)

Answer = Callable[[Connection, str, Request, Bytes], Message | None]
"""Called with connection, node, request and payload (valid during the call). Returns the answer, or None when it has
answered itself, or there is none. Raises Refusal."""


class Server:
    """Listens from the start.

    Args:
        address: an IPv4 or IPv6 address, or a name, of this host; the port is the kernel's choice.
        me: who we are.
        answer: what becomes of a request.

    Raises:
        OSError: that address cannot be listened on.
    """

    def __init__(self, address: str, me: Identity, answer: Answer) -> None:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self._sock = socket.create_server((address, 0), family=family, backlog=128)
        self.host, self.port = self._sock.getsockname()[:2]
        self._me = me
        self._answer = answer
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._strangers = 0
        self._closed = False
        self._logged: dict[str, float] = {}
        self._thread = threading.Thread(target=self._accept, name="leto-keeper", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Stop listening, end all connections and wait for their threads, each for at most so long."""
        with self._lock:
            self._closed = True
            threads = dict(self._connections)
        self._sock.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join(seconds)
        self._sock.close()
        for connection in threads:
            connection.interrupt()
        for thread in threads.values():
            thread.join(seconds)

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._sock.accept()
            except OSError as error:
                if self._closed:
                    return
                self._log("accept", str(error))  # out of descriptors, or it was gone again
                time.sleep(0.01)
                continue
            with self._lock:
                refuse = self._closed or self._strangers >= STRANGERS
                if not refuse:
                    self._strangers += 1
                    connection = Connection(sock)
                    thread = threading.Thread(
                        target=self._serve, args=(connection, str(peer[0])), name=f"leto-serve-{peer[0]}", daemon=True
                    )
                    self._connections[connection] = thread
                    thread.start()
            if refuse:
                self._log(str(peer[0]), "too many connections that have not proved themselves")
                sock.close()

    def _serve(self, connection: Connection, peer: str) -> None:
        try:
            try:
                node = admit(connection, self._me)
            finally:
                with self._lock:
                    self._strangers -= 1
            buffer = np.empty(CHUNK, dtype=np.uint8)
            while True:
                request, payload = connection.receive(REQUESTS, buffer)
                try:
                    answer = self._answer(connection, node, request, payload)
                except Refusal as refusal:
                    answer = Refused(str(refusal)[:_REASON])
                if answer is not None:
                    connection.send(ANSWER, answer)
        except Closed:
            pass
        except (ProtocolError, OSError) as error:
            if not self._closed:
                self._log(peer, str(error) or type(error).__name__)
        finally:
            connection.close()
            with self._lock:
                self._connections.pop(connection, None)

    def _log(self, peer: str, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._logged.get(peer, -_LOG_EVERY) < _LOG_EVERY:
                return
            if len(self._logged) >= _LOGGED:
                self._logged.clear()
            self._logged[peer] = now
        logger.warning("connection from %s dropped: %s", peer, reason)
