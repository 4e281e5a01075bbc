"""The c10d store of a job: a server in the agent, so that no worker's death takes it along.

One server serves all epochs of one start of the group; keys are prefixed by epoch, and a worker keeps its connection
(see `comm.store` for what a new one can cost). A restart of the whole group gets a fresh server, since scripts that
call `dist.init_process_group` themselves use keys without a prefix.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from leto_elastic.wire import StoreAddress

_BACKLOG = 2048


class Stores:
    """The server at hand; it listens on one address only, on a port that the kernel chose."""

    def __init__(self, timeout: float, host: str = "127.0.0.1") -> None:
        self._timeout = timedelta(seconds=timeout)
        self._host = host
        self._server: TCPStore | None = None
        self._address = StoreAddress(host, 0)

    def make(self) -> StoreAddress:
        """The server's address; it is started if there is none."""
        if self._server is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.bind((self._host, 0))
                sock.listen(_BACKLOG)
                port: int = sock.getsockname()[1]
                self._server = TCPStore(
                    self._host,
                    port,
                    None,
                    True,
                    self._timeout,
                    wait_for_workers=False,
                    master_listen_fd=sock.detach(),
                )
            self._address = StoreAddress(self._host, port)
        return self._address

    def fresh(self) -> StoreAddress:
        """As `make`, never a server that was used before."""
        self.close()
        return self.make()

    @property
    def server(self) -> TCPStore:
        """The server itself. Raises RuntimeError when there is none."""
        if self._server is None:
            raise RuntimeError("no store was made")
        return self._server

    def close(self) -> None:
        """End the server."""
        self._server = None
