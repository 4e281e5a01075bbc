"""Which etcd to use and how to be let in, from `--rdzv-endpoint` and `--rdzv-conf`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from leto_elastic.errors import ConfigError

DEFAULT_PORT = 2379

CONF_KEYS = ("endpoints", "ca", "cert", "key", "user", "password", "password_env")
"""Keys of `--rdzv-conf` that `EtcdSettings.parse` reads."""


class EtcdSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the etcd servers are and how to be let in.

    Args:
        endpoints: `host:port` of each member, at least one.
        tls: connect by TLS.
        ca: PEM file of the authority that signed the servers' certificates; None: the system's.
        cert, key: PEM files of this client's certificate, for servers that ask for one.
        user, password: for servers with authentication.
        embedded: the server is this agent's own (see `EmbeddedEtcd`).
    """

    endpoints: tuple[str, ...]
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = None
    embedded: bool = False

    def __repr__(self) -> str:
        """Without the password."""
        who = f", user={self.user!r}" if self.user is not None else ""
        return f"EtcdSettings({self.where}{', tls' if self.tls else ''}{who})"

    @property
    def where(self) -> str:
        """The endpoints, for messages."""
        return ", ".join(self.endpoints)

    @classmethod
    def parse(
        cls, endpoint: str, conf: Mapping[str, str], environ: Mapping[str, str] = os.environ
    ) -> EtcdSettings | None:
        """The settings of a command line; None when it names no etcd, so that the agent starts one of its own.

        Raises ConfigError for settings that cannot work: an endpoint that is none, a file that cannot be read, half of
        a pair.
        """
        named = [part.strip() for part in (endpoint, *conf.get("endpoints", "").split(";")) if part.strip()]
        given = {key: conf[key] for key in CONF_KEYS if key != "endpoints" and conf.get(key, "") != ""}
        if not named:
            if given:
                raise ConfigError(
                    f"--rdzv-conf has {', '.join(given)} but names no etcd: give --rdzv-endpoint or endpoints="
                )
            return None
        parsed = [_endpoint(text) for text in named]
        schemes = {scheme for scheme, _ in parsed if scheme}
        if len(schemes) > 1:
            raise ConfigError(f"etcd endpoints mix http and https: {', '.join(named)}")
        tls = "https" in schemes or any(key in given for key in ("ca", "cert", "key"))
        if tls and "http" in schemes:
            raise ConfigError(f"ca, cert or key is set, but the endpoint is plain http: {', '.join(named)}")
        for name in ("ca", "cert", "key"):
            if name in given:
                _check_pem(name, given[name])
        if ("cert" in given) != ("key" in given):
            raise ConfigError("etcd client certificates need both cert= and key= in --rdzv-conf")
        return cls(
            endpoints=tuple(dict.fromkeys(address for _, address in parsed)),
            tls=tls,
            ca=given.get("ca"),
            cert=given.get("cert"),
            key=given.get("key"),
            user=given.get("user"),
            password=_password(given, environ),
        )


def check_run_id(run_id: str, settings: EtcdSettings | None) -> None:
    """Raises ConfigError for a run id that cannot tell jobs apart.

    `none` is torchrun's default of `--rdzv-id`: on an etcd that others use too, two jobs would take each other's plans.
    """
    if not run_id:
        raise ConfigError("the run id is empty: give --rdzv-id=NAME")
    if run_id == "none" and settings is not None and not settings.embedded:
        raise ConfigError(
            f"a run id is needed on the shared etcd at {settings.where}: give --rdzv-id=NAME (it is 'none' by default)"
        )


def _endpoint(text: str) -> tuple[str, str]:
    """(scheme or "", host:port) of an endpoint."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    elif scheme not in ("http", "https"):
        raise ConfigError(f"etcd endpoint {text!r} is neither host:port nor an http or https address")
    rest = rest.rstrip("/")
    if rest.startswith("["):
        host, closed, tail = rest.partition("]")
        host += closed
        port = tail.removeprefix(":") if tail else ""
        valid = bool(closed) and (not tail or tail.startswith(":"))
    else:
        host, _, port = rest.partition(":")
        valid = bool(host) and not set(host) & set("/@ ,\t")
    if ":" not in rest.removeprefix(host):
        port = str(DEFAULT_PORT)
    if not valid or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"etcd endpoint {text!r} is not host:port with a port from 1 to 65535")
    return scheme, f"{host}:{int(port)}"


def _check_pem(name: str, path: str) -> None:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the file of {name}= for etcd: {path}: {error.strerror}") from error
    if b"-----BEGIN " not in text:
        raise ConfigError(f"the file of {name}= for etcd is not in PEM format: {path}")


def _password(given: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    if "password" in given and "password_env" in given:
        raise ConfigError("give either password= or password_env= for etcd, not both")
    password = given.get("password")
    if "password_env" in given:
        password = environ.get(given["password_env"])
        if not password:
            raise ConfigError(f"the environment variable of password_env= for etcd is not set: {given['password_env']}")
    if (password is None) != ("user" not in given):
        raise ConfigError("etcd authentication needs both user= and password= (or password_env=) in --rdzv-conf")
    return password
