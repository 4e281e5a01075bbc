"""What is wrong with an etcd is one clear line, soon, and nothing else on the terminal."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.errors import ConfigError
from tests.process.etcd_server import Certificates, Server, connect, run, server

pytestmark = pytest.mark.process

TIMEOUT = 3.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("pki") / "made")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("plain") / "data") as etcd:
        yield etcd


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Server]:
    """Asks for client certificates."""
    with server(tmp_path_factory.mktemp("tls") / "data", certificates=certificates, client_auth=True) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("users") / "data") as etcd:
        etcd.enable_users()
        yield etcd


def refused(settings: EtcdSettings, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that opening ends with."""

    async def test() -> str:
        started = time.monotonic()
        with pytest.raises(ConfigError) as error:
            await connect(settings, TIMEOUT)
        assert time.monotonic() - started < TIMEOUT + 1.0
        return str(error.value)

    message = run(test)
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")
    return message


def test_nobody_listens(capfd: pytest.CaptureFixture[str]) -> None:
    message = refused(EtcdSettings(endpoints=("127.0.0.1:1",)), capfd)
    assert "no etcd to work with within 3 s: 127.0.0.1:1: " in message
    assert "refused" in message
    assert "--rdzv-endpoint" in message


def test_an_unknown_host(capfd: pytest.CaptureFixture[str]) -> None:
    assert "the name no-such-host.invalid does not resolve" in refused(
        EtcdSettings(endpoints=("no-such-host.invalid:2379",)), capfd
    )


def test_a_port_that_does_not_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        message = refused(EtcdSettings(endpoints=(f"127.0.0.1:{silent.getsockname()[1]}",)), capfd)
    assert "does not answer" in message


def test_wrong_password_is_said_without_showing_it(users: Server, capfd: pytest.CaptureFixture[str]) -> None:
    message = refused(users.settings(user="ann", password="hunter2"), capfd)
    assert "user 'ann'" in message
    assert "wrong user or password" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("who", "expected"),
    [
        ({}, "asks for a user"),
        ({"user": "bob", "password": "bobpw"}, "no permission for keys under /leto/"),
    ],
)
def test_no_access(users: Server, who: dict[str, str], expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(users.settings(**who), capfd)


def test_a_user_where_there_are_none(plain: Server, capfd: pytest.CaptureFixture[str]) -> None:
    assert "no authentication enabled" in refused(plain.settings(user="ann", password="annpw"), capfd)


def test_tls_to_a_plain_server(plain: Server, certificates: Certificates, capfd: pytest.CaptureFixture[str]) -> None:
    message = refused(msgspec.structs.replace(plain.settings(), tls=True, ca=certificates.ca), capfd)
    assert "is it plain http?" in message


def test_plain_to_a_tls_server(tls: Server, capfd: pytest.CaptureFixture[str]) -> None:
    assert "speaks TLS: give ca=" in refused(EtcdSettings(endpoints=tls.endpoints), capfd)


def test_without_the_certificate_that_the_server_asks_for(tls: Server, capfd: pytest.CaptureFixture[str]) -> None:
    message = refused(msgspec.structs.replace(tls.settings(), cert=None, key=None), capfd)
    assert "does not accept our certificate" in message


def test_another_authority(tls: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = Certificates.make(tmp_path / "other")
    message = refused(msgspec.structs.replace(tls.settings(), ca=other.ca), capfd)
    assert "is not trusted" in message
    assert "check ca=" in message


def test_a_key_of_another_certificate(
    tls: Server, certificates: Certificates, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(certificates, client_key=certificates.key)
    settings: Any = msgspec.structs.replace(tls.settings(), key=wrong.client_key)
    assert "the certificate files do not work" in refused(settings, capfd)
