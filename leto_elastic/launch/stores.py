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

_HOST = "127.0.0.1"
_BACKLOG = 2048


class Stores:
    """The server at hand; it listens on loopback only, on a port that the kernel chose."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._server: TCPStore | None = None
        self._address = StoreAddress(_HOST, 0)

    def make(self) -> StoreAddress:
        """The server's address; it is started if there is none."""
        if self._server is None:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
                sock.bind((_HOST, 0))
                sock.listen(_BACKLOG)
                port: int = sock.getsockname()[1]
                self._server = TCPStore(
                    _HOST,
                    port,
                    None,
                    True,
                    self._timeout,
                    wait_for_workers=False,
                    master_listen_fd=sock.detach(),
                )
            self._address = StoreAddress(_HOST, port)
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
