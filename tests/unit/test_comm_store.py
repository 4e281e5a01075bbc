"""Clients of the agent's store that are opened ahead of their use."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
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


@pytest.fixture
def port() -> Iterator[int]:
    """One that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_store_that_is_gone_is_not_waited_for_ahead_of_its_use(port: int) -> None:
    """A shadow that is being prepared when the node of the store is lost gets another one with its plan."""
    begin = time.monotonic()
    StoreClients().prepare("127.0.0.1", port, 30.0)
    assert time.monotonic() - begin < 10.0


def test_a_store_that_is_gone_is_waited_for_until_its_epoch_is_given_up(port: int) -> None:
    """The node of the store is lost just after the plan that names it."""
    begin = time.monotonic()
    over = threading.Event()
    timer = threading.Timer(0.1, over.set)
    timer.start()
    with pytest.raises(RuntimeError, match="does not answer"):
        StoreClients().get("127.0.0.1", port, 30.0, over.is_set)
    timer.join()
    assert time.monotonic() - begin < 10.0


def test_the_deadline_holds(port: int) -> None:
    with pytest.raises(RuntimeError, match=f"port {port} does not answer"):
        StoreClients().get("127.0.0.1", port, 0.05)
