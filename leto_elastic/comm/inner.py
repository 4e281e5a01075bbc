"""The inner groups of one epoch, on gloo.

All groups of an epoch share one gloo device (one listener, one event thread) and one store client. Peers publish the
address of their device first, so that everyone knows which connections are the epoch's before there is any, and nobody
starts gloo's handshake before all members are there.

The wait for all ranks polls the store. Rejected: its blocking wait, which only an end of its socket interrupts; torch
answers that with forty lines of native stack on the terminal of every survivor.

`sever` ends the connections: gloo's own `abort` and `shutdown` return and wake nobody, and after a peer's death only
its neighbours in the ring see an error (a stopped peer: nobody). It ends their reading, upon which gloo closes them and
tells all who wait. Not so for a message whose writing fails: who waits for that one is told nothing, until its timeout
(`Pair::signalException` passes over `tx_`; gloo as in torch 2.13). So neither this side nor a peer that is not severed
yet may be kept from writing: the connections stay, by duplicates, until `let_go` or until that takes too long.

`interrupt` also wakes a construction under way. That can block in three places: in gloo's reads of the store (the
client's socket is shut down), on a connection (severed like the others) and on a connection that a peer is to make (see
`sockets.knock`).

Everything may be called from another thread than the one that builds.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from leto_elastic.comm import sockets
from leto_elastic.comm.sockets import Address, Connection
from leto_elastic.comm.store import StoreClient
from leto_elastic.errors import CommunicatorLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupNCCL

_THREADS = 2  # per group, torch's own number
_GENTLE = 0.2  # seconds in which connections are only ended for reading
_POLL = 0.001  # seconds between two looks at who has come


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("localhost", "::1")


class GlooEpoch:
    """Store client, device and inner groups of epoch `number`.

    `address`: a name or address of this node, IPv4 or IPv6, at which the device listens and peers reach it; "": the
    loopback interface when the store is there, else what gloo finds. GLOO_SOCKET_IFNAME has precedence.
    """

    def __init__(self, number: int, rank: int, world_size: int, nccl: bool = False, address: str = "") -> None:
        self.number = number
        self.store: Store | None = None
        self._rank = rank
        self._world_size = world_size
        self._nccl = nccl
        self._address = address
        self._client: StoreClient | None = None
        self._devices: list[ProcessGroupGloo.Device] = []
        self._listeners: list[Address] = []
        self._peers: set[Address] = set()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._severed = math.inf  # when it began
        self._held: dict[Connection, socket.socket] = {}  # severed, and kept from their peers
        self._pairs = 0  # numbers that the device has given to pairs so far
        self._building = range(0)  # the numbers of the group that is being built
        self._accelerated: list[ProcessGroupNCCL] = []

    def open(self, client: StoreClient, deadline: float) -> None:
        """Publish this rank's device in the store, wait until every rank has published its own.

        Raises CommunicatorLost with the missing ranks at `deadline` (`time.monotonic`).
        """
        self._client = client
        self.store = PrefixStore(f"epoch/{self.number}", client.store)
        self._create_devices(client.host)
        self.store.set(f"device/{self._rank}", ",".join(str(address) for address in self._listeners))
        keys = [f"device/{rank}" for rank in range(self._world_size)]
        self._await_all(self.store, keys, deadline)
        for value in self.store.multi_get(keys):
            self._peers.update(Address.parse(part) for part in value.decode().split(","))
        self._peers.difference_update(self._listeners)

    def _await_all(self, store: Store, keys: list[str], deadline: float) -> None:
        started = time.monotonic()
        while not store.check(keys):
            if self._stop.wait(_POLL) or time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                waited = time.monotonic() - started
                raise CommunicatorLost(f"epoch {self.number}: ranks {missing} did not come within {waited:.1f} s")

    def _create_devices(self, store_host: str) -> None:
        before = set(sockets.listening())
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        if names:
            self._devices = [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names]
        elif self._address:
            self._devices = [ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)]
        elif _is_loopback(store_host):
            self._devices = [ProcessGroupGloo.create_device(interface="lo", lazy_init=False)]
        else:
            self._devices = [ProcessGroupGloo.create_default_device(lazy_init=False)]
        self._listeners = [address for fd, address in sockets.listening().items() if fd not in before]

    def build(self, name: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        """The inner group of `name`. Returns when all members are connected; raises RuntimeError when interrupted."""
        assert self.store is not None
        store = PrefixStore(name, self.store)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = self._devices
        options._timeout = timeout
        options._threads = _THREADS * len(self._devices)
        self._building = range(self._pairs, self._pairs + size)
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
        self._pairs += size
        self._building = range(0)
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        if self._nccl:
            from leto_elastic.comm import nccl

            self._accelerated.append(nccl.add(group, store, rank, size, timeout))
        elif torch.cuda.is_available():
            group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group

    def sever(self) -> bool:
        """End all connections between this rank and its peers, reading first. To be called again until it says that
        there were none left to end.
        """
        for backend in self._accelerated:
            backend.abort()
        with self._lock:
            now = time.monotonic()
            self._severed = min(self._severed, now)
            if now - self._severed < _GENTLE:
                return sockets.end_reading(self._listeners, self._peers, self._held) > 0
        self.let_go()
        return sockets.shut_down(self._listeners, self._peers) > 0

    def let_go(self) -> None:
        """The peers may see the end of severed connections: all are severed at their side too, or take too long."""
        with self._lock:
            for sock in self._held.values():
                sock.close()
            self._held.clear()

    def interrupt(self) -> None:
        """`sever`, and wake whoever is in `open` or `build`. The epoch is of no use after that."""
        self._stop.set()
        if self._building and self._client is not None:
            self._client.cut()
        self.sever()
        for address in self._listeners:
            sockets.knock(address, self._building)
