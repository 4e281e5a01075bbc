"""The c10d stores of a job: one fresh server per epoch, in the agent, so that no worker's death takes one along."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from leto_elastic.wire import StoreAddress

_HOST = "127.0.0.1"
_BACKLOG = 2048


class Stores:
    """Store servers by epoch; they listen on loopback only, on a port that the kernel chose."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._servers: dict[int, tuple[TCPStore, StoreAddress]] = {}

    def make(self, epoch: int) -> StoreAddress:
        """The address of the epoch's server, which is started if there is none."""
        if epoch not in self._servers:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
                sock.bind((_HOST, 0))
                sock.listen(_BACKLOG)
                port: int = sock.getsockname()[1]
                store = TCPStore(
                    _HOST,
                    port,
                    None,
                    True,
                    self._timeout,
                    wait_for_workers=False,
                    master_listen_fd=sock.detach(),
                )
            self._servers[epoch] = (store, StoreAddress(_HOST, port))
        return self._servers[epoch][1]

    def server(self, epoch: int) -> TCPStore:
        """The server itself. Raises KeyError when the epoch has none."""
        return self._servers[epoch][0]

    def fresh(self, epoch: int) -> StoreAddress:
        """As `make`, never one that was used before."""
        self._servers.pop(epoch, None)
        return self.make(epoch)

    def drop_before(self, epoch: int) -> None:
        """End the servers of earlier epochs."""
        for old in [known for known in self._servers if known < epoch]:
            del self._servers[old]

    def close(self) -> None:
        self._servers.clear()
