"""This process's client of the agent's store, kept from epoch to epoch.

A new connection costs more than it seems: torch formats the peer's address for its log by a reverse lookup of the name
(`getnameinfo`, also for 127.0.0.1, which it writes as ::ffff:127.0.0.1), and a name server that does not answer makes
that five seconds in the middle of a recovery. So a client is opened once per server address, in a parked shadow too,
and epochs are told apart by their prefix.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from leto_elastic.comm import sockets
from leto_elastic.comm.sockets import Address

_MOMENT = 1.0
"""Seconds for one attempt to reach a store's host."""

_POLL = 0.02


class StoreClient:
    """A connection to the store at `host`, `port`; `seconds` bounds the attempt and each later request."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        self.host = host
        self.port = port
        self.broken = False
        before = sockets.connected_to(host, port)
        limit = timedelta(seconds=max(seconds, 1.0))
        self.store = TCPStore(host, port, None, False, limit, wait_for_workers=False)
        self._own_ends: set[Address] = sockets.connected_to(host, port) - before

    def answers(self) -> bool:
        """Whether it can be used (its server may have gone and another have taken the port)."""
        if self.broken:
            return False
        try:
            self.store.check(["any"])
        except RuntimeError:
            self.broken = True
        return not self.broken

    def cut(self) -> None:
        """Wake whoever is in a request; the client is of no use after that. Any thread."""
        self.broken = True
        sockets.shut_down(self._own_ends, [])


class StoreClients:
    """The one client that is open, if any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: StoreClient | None = None

    def get(self, host: str, port: int, seconds: float, given_up: Callable[[], bool] = lambda: False) -> StoreClient:
        """The client of that server, opened when there is none yet.

        Raises RuntimeError when the server does not answer within that time, or until `given_up()`: torch's own attempt
        to connect cannot be interrupted, so it is made only once somebody listens there.
        """
        with self._lock:
            client = self._client
            if client is None or (client.host, client.port) != (host, port) or not client.answers():
                _reach(host, port, time.monotonic() + seconds, given_up)
                client = self._client = StoreClient(host, port, seconds)
            return client

    def prepare(self, host: str, port: int, seconds: float) -> None:
        """Open the client of that server ahead of its use, if it is there: it may have gone with its node meanwhile."""
        with contextlib.suppress(RuntimeError):
            self.get(host, port, seconds, given_up=lambda: True)


def _reach(host: str, port: int, end: float, given_up: Callable[[], bool]) -> None:
    while True:
        try:
            socket.create_connection((host, port), _MOMENT).close()
        except OSError as error:
            if given_up() or time.monotonic() >= end:
                raise RuntimeError(f"the store at {host}, port {port} does not answer: {error}") from error
        else:
            return
        time.sleep(_POLL)
