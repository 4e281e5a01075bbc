"""Where the device of an epoch listens."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from leto_elastic.comm.inner import GlooEpoch
from leto_elastic.comm.store import StoreClient

LIMIT = 30.0


@pytest.fixture
def client() -> StoreClient:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT), wait_for_workers=False)
    client = StoreClient("127.0.0.1", server.port, LIMIT)
    client.server = server  # type: ignore[attr-defined]  # lives as long
    return client


def hosts(epoch: GlooEpoch) -> list[str]:
    return [address.host for address in epoch._listeners]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::1"])
def test_at_the_address(address: str, client: StoreClient) -> None:
    epoch = GlooEpoch(3, 0, 1, address=address)
    epoch.open(client, time.monotonic() + LIMIT)
    assert hosts(epoch) == [address]


def test_what_the_user_says_has_precedence(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    epoch = GlooEpoch(0, 0, 1, address="127.0.0.9")
    epoch.open(client, time.monotonic() + LIMIT)
    assert hosts(epoch) == ["127.0.0.1"]


def test_without_an_address_a_store_at_home_means_loopback(client: StoreClient) -> None:
    epoch = GlooEpoch(0, 0, 1)
    epoch.open(client, time.monotonic() + LIMIT)
    assert hosts(epoch) == ["127.0.0.1"]
