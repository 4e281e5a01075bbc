"""What `--rdzv-endpoint` and `--rdzv-conf` say about etcd."""

from __future__ import annotations

from pathlib import Path

import pytest

from leto_elastic.coordinator.settings import CONF_KEYS, EtcdSettings, check_run_id
from leto_elastic.errors import ConfigError

PEM = "-----BEGIN CERTIFICATE-----\n"


@pytest.fixture
def pem(tmp_path: Path) -> str:
    (tmp_path / "file.pem").write_text(PEM)
    return str(tmp_path / "file.pem")


@pytest.mark.parametrize(
    ("endpoint", "endpoints", "expected", "tls"),
    [
        ("a:1", "", ("a:1",), False),
        ("a", "", ("a:2379",), False),
        ("", "a:1;b:2", ("a:1", "b:2"), False),
        ("a:1", " b:2 ; a:1;", ("a:1", "b:2"), False),
        ("http://a:1/", "", ("a:1",), False),
        ("https://a:1", "https://b", ("a:1", "b:2379"), True),
        ("[::1]:2379", "", ("[::1]:2379",), False),
        ("[::1]", "", ("[::1]:2379",), False),
        ("10.0.0.1:02379", "", ("10.0.0.1:2379",), False),
    ],
)
def test_endpoints(endpoint: str, endpoints: str, expected: tuple[str, ...], tls: bool) -> None:
    settings = EtcdSettings.parse(endpoint, {"endpoints": endpoints}, {})
    assert settings == EtcdSettings(endpoints=expected, tls=tls)


def test_no_endpoint_means_an_etcd_of_our_own() -> None:
    assert EtcdSettings.parse("", {}, {}) is None
    assert EtcdSettings.parse(" ", {"endpoints": ";"}, {}) is None


@pytest.mark.parametrize(
    "endpoint",
    [
        "a:",
        "a:x",
        "a:0",
        "a:65536",
        "a:-1",
        "a:²",
        ":1",
        "::1",
        "a:1:2",
        "[::1",
        "[::1]x",
        "[::1]:",
        "ftp://a:1",
        "a/b:1",
    ],
)
def test_bad_endpoints(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        EtcdSettings.parse(endpoint, {}, {})


def test_http_and_https_do_not_mix(pem: str) -> None:
    with pytest.raises(ConfigError, match="mix"):
        EtcdSettings.parse("https://a:1", {"endpoints": "http://b:1"}, {})
    with pytest.raises(ConfigError, match="plain http"):
        EtcdSettings.parse("http://a:1", {"ca": pem}, {})


def test_certificates(pem: str) -> None:
    assert EtcdSettings.parse("a:1", {"ca": pem, "cert": pem, "key": pem}, {}) == EtcdSettings(
        endpoints=("a:1",), tls=True, ca=pem, cert=pem, key=pem
    )


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
def test_bad_certificate_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read the file of {name}="):
        EtcdSettings.parse("a:1", {name: str(tmp_path / "missing")}, {})
    with pytest.raises(ConfigError, match=f"cannot read the file of {name}="):
        EtcdSettings.parse("a:1", {name: str(tmp_path)}, {})
    (tmp_path / "binary").write_bytes(b"\x30\x82")
    with pytest.raises(ConfigError, match="not in PEM format"):
        EtcdSettings.parse("a:1", {name: str(tmp_path / "binary")}, {})


@pytest.mark.parametrize("name", ["cert", "key"])
def test_half_a_pair_of_certificates(name: str, pem: str) -> None:
    with pytest.raises(ConfigError, match="both cert= and key="):
        EtcdSettings.parse("a:1", {name: pem}, {})


def test_passwords() -> None:
    given = EtcdSettings.parse("a:1", {"user": "ann", "password": "secret"}, {})
    from_env = EtcdSettings.parse("a:1", {"user": "ann", "password_env": "PW"}, {"PW": "secret"})
    assert given == from_env == EtcdSettings(endpoints=("a:1",), user="ann", password="secret")
    assert "secret" not in repr(given)


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"user": "ann"}, "both user= and password="),
        ({"password": "secret"}, "both user= and password="),
        ({"user": "ann", "password": "secret", "password_env": "PW"}, "not both"),
        ({"user": "ann", "password_env": "UNSET"}, "is not set: UNSET"),
    ],
)
def test_bad_passwords(conf: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        EtcdSettings.parse("a:1", conf, {"PW": "secret"})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("key", [key for key in CONF_KEYS if key != "endpoints"])
def test_keys_without_an_etcd_that_they_are_for(key: str) -> None:
    with pytest.raises(ConfigError, match="names no etcd"):
        EtcdSettings.parse("", {key: "x"}, {})


def test_run_ids() -> None:
    shared = EtcdSettings(endpoints=("a:1",))
    own = EtcdSettings(endpoints=("a:1",), embedded=True)
    check_run_id("job", shared)
    check_run_id("none", None)
    check_run_id("none", own)
    with pytest.raises(ConfigError, match="--rdzv-id=NAME"):
        check_run_id("none", shared)
    with pytest.raises(ConfigError, match="empty"):
        check_run_id("", own)
