"""Clients of the agent's store that are opened ahead of their use."""

from __future__ import annotations

import socket
import time

from torch.distributed import TCPStore

from leto_elastic.comm.store import StoreClients


def test_a_client_that_was_opened_ahead_is_the_one_that_is_used() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = StoreClients()
    clients.prepare("127.0.0.1", server.port, 10.0)
    client = clients.get("127.0.0.1", server.port, 10.0)
    client.store.set("key", "value")
    assert server.get("key") == b"value"
    assert clients.get("127.0.0.1", server.port, 10.0) is client


def test_a_store_that_is_gone_is_not_waited_for_ahead_of_its_use() -> None:
    """A shadow that is being prepared when the node of the store is lost gets another one with its plan."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # nobody listens there
        begin = time.monotonic()
        StoreClients().prepare("127.0.0.1", port, 30.0)
        assert time.monotonic() - begin < 10.0
