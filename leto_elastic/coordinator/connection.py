"""A connection to an etcd cluster that outlives its servers: one gRPC channel at a time, retries, authentication.

Guarantees: a call either returns the server's answer, raises `ConfigError` for what no retry can mend (password,
permission, TLS), or goes on trying, with backoff and over all endpoints, until its own deadline. A call that is
retried may have been carried out before: callers make it idempotent.

Considered and rejected:
  * etcd3aio's own `Etcd3Client`: it accepts only IP addresses (`ipv4:` targets), so no TLS host names; its retries
    are counted, not timed; a watch that it resumes starts after the *server's* revision rather than after the last
    event delivered, which loses events; a compacted or refused watch hangs. Its services and messages are used.
  * one channel over all endpoints with gRPC's round robin: one TLS name for all of them.
  * etcd's JSON gateway: as fast, but hardened servers switch it off, and it cannot pass a client certificate on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from leto_elastic.coordinator import stubs
from leto_elastic.coordinator.probe import probe
from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.errors import ConfigError, LetoError

T = TypeVar("T")

_BACKOFF_FIRST, _BACKOFF_LAST = 0.02, 0.5

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]


class EtcdUnavailable(LetoError):
    """etcd did not answer within the deadline of the call; it may have carried it out nevertheless."""


class EtcdClosed(LetoError):
    """The client was closed while the call was under way."""


class EtcdRefused(LetoError):
    """etcd refused the request itself, such as one for a lease that has ended."""


class Link:
    """One channel to one endpoint with the services over it; closed when it is retired and nobody uses it."""

    def __init__(self, settings: EtcdSettings, endpoint: str) -> None:
        self.endpoint = endpoint
        if settings.tls:
            files = [_read(path) for path in (settings.ca, settings.key, settings.cert)]
            credentials = stubs.grpc.ssl_channel_credentials(*files)
            self.channel = stubs.grpc.aio.secure_channel(f"dns:///{endpoint}", credentials, options=_OPTIONS)
        else:
            self.channel = stubs.grpc.aio.insecure_channel(f"dns:///{endpoint}", options=_OPTIONS)
        self.kv = stubs.KVService(self.channel, max_attempts=1)
        self.lease = stubs.LeaseService(self.channel, max_attempts=1)
        self.auth = stubs.AuthService(self.channel, max_attempts=1)
        self.watch = stubs.WatchStub(self.channel)
        self.token: str | None = None
        self.users = 0
        self.retired = False

    def set_token(self, token: str) -> None:
        """Use a token in all calls from now on."""
        self.token = token
        for service in (self.kv, self.lease):
            service.set_token(token)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For streams: break them when the member loses its cluster; the token."""
        token = () if self.token is None else (("token", self.token),)
        return (("hasleader", "true"), *token)


class Connection:
    """See the module. `request_timeout` bounds one attempt (s)."""

    def __init__(self, settings: EtcdSettings, request_timeout: float) -> None:
        self.settings = settings
        self.attempt = request_timeout / len(settings.endpoints)
        self._next = 0
        self._link: Link | None = None
        self._links: set[Link] = set()
        self._login = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self.closed = False

    async def open(self, check_key: str, timeout: float) -> None:
        """Connect, log in, and read a key. Raises ConfigError when that does not come about within `timeout` s."""
        started = time.monotonic()
        try:
            await self.call(lambda link: link.kv.get(check_key), min(timeout, max(0.5, timeout / 8)))
            return
        except EtcdUnavailable:
            findings = [await probe(e, self.settings, min(2.0, timeout / 4)) for e in self.settings.endpoints]
        if all(finding.final for finding in findings):
            raise ConfigError(f"cannot use etcd: {'; '.join(finding.text for finding in findings)}")
        remaining = timeout - (time.monotonic() - started) - 0.5
        try:
            await self.call(lambda link: link.kv.get(check_key), max(0.1, remaining))
        except EtcdUnavailable as error:
            findings = [await probe(e, self.settings, 0.5 / len(findings)) for e in self.settings.endpoints]
            raise ConfigError(
                f"no etcd to work with within {timeout:g} s: {'; '.join(finding.text for finding in findings)}; "
                "check --rdzv-endpoint, or leave it out to use an etcd of leto's own"
            ) from error

    async def call(self, request: Callable[[Link], Awaitable[T]], timeout: float | None) -> T:
        """Carry a request out, on whichever endpoint answers.

        Args:
            request: makes the call on a link; may run several times.
            timeout: s; None: until cancelled or closed.

        Raises EtcdUnavailable, EtcdClosed, EtcdRefused or ConfigError.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        backoff, logins = _BACKOFF_FIRST, 0
        while True:
            remaining = self.attempt if deadline is None else deadline - time.monotonic()
            async with self.link() as link:
                token = link.token
                try:
                    async with asyncio.timeout(min(remaining, self.attempt)):
                        await self._authenticate(link)
                        token = link.token
                        return await request(link)
                except (stubs.EtcdError, stubs.grpc.aio.AioRpcError, TimeoutError) as error:
                    fault = classify(error, self.settings)
                if fault.login and logins < 2:
                    logins += 1
                    if link.token == token:
                        link.token = None
                    continue
                if fault.fatal is not None:
                    raise fault.fatal
                self._rotate(link)
            if deadline is not None and time.monotonic() + backoff >= deadline:
                where = self.settings.where
                raise EtcdUnavailable(f"etcd at {where} did not answer within {timeout:g} s: {fault.text}")
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _BACKOFF_LAST)

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        """The current link, kept open while in use. Turns the cancelling of calls by `close` into EtcdClosed."""
        if self._ended():
            raise EtcdClosed("the etcd client is closed")
        if self._link is None:
            endpoint = self.settings.endpoints[self._next % len(self.settings.endpoints)]
            self._link = Link(self.settings, endpoint)
            self._links.add(self._link)
        link = self._link
        link.users += 1
        try:
            yield link
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._ended() and task is not None and not task.cancelling():
                raise EtcdClosed("the etcd client was closed") from None
            raise
        finally:
            link.users -= 1
            self._dispose(link)

    async def close(self) -> None:
        """Close all channels. Calls under way end with EtcdClosed."""
        self.closed = True
        self._link = None
        while self._links:
            await self._links.pop().channel.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def failed(self, link: Link) -> None:
        """A stream over `link` broke: use the next endpoint."""
        self._rotate(link)

    def _ended(self) -> bool:
        return self.closed

    def _rotate(self, link: Link) -> None:
        if self._link is link and len(self.settings.endpoints) > 1:
            self._next += 1
            self._link = None
            link.retired = True

    def _dispose(self, link: Link) -> None:
        if link.retired and link.users == 0 and link in self._links:
            self._links.remove(link)
            task = asyncio.get_running_loop().create_task(link.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _authenticate(self, link: Link) -> None:
        user, password = self.settings.user, self.settings.password
        if user is None or password is None or link.token is not None:
            return
        async with self._login:
            if link.token is None:
                link.set_token((await link.auth.authenticate(user, password)).token)


class Fault:
    """What to do about an error of a call: `fatal` to raise, `login` to log in again first, neither: to try again."""

    def __init__(self, text: str, *, fatal: LetoError | None = None, login: bool = False) -> None:
        self.text, self.fatal, self.login = text, fatal, login


def classify(error: Exception, settings: EtcdSettings) -> Fault:
    """The fault behind an exception of etcd3aio or grpc."""
    if isinstance(error, TimeoutError):
        return Fault("no answer")
    cause: Any = error if isinstance(error, stubs.grpc.aio.AioRpcError) else error.__cause__
    if not isinstance(cause, stubs.grpc.aio.AioRpcError):
        return Fault(str(error), fatal=LetoError(f"etcd request failed: {error}"))
    return classify_status(cause.code(), cause.details() or "", settings)


def classify_status(code: Any, details: str, settings: EtcdSettings) -> Fault:
    """The fault behind a gRPC status."""
    status = stubs.grpc.StatusCode
    who = f"user {settings.user!r} on etcd at {settings.where}"
    if code in (status.UNAVAILABLE, status.DEADLINE_EXCEEDED, status.CANCELLED, status.UNKNOWN, status.ABORTED):
        return Fault(details or code.name)
    if "authentication failed" in details:
        return Fault(details, fatal=ConfigError(f"{who}: wrong user or password"))
    if "authentication is not enabled" in details:
        advice = "has no authentication enabled: leave user= and password= out"
        return Fault(details, fatal=ConfigError(f"etcd at {settings.where} {advice}"))
    if "user name is empty" in details:
        advice = "asks for a user: give user= and password_env= in --rdzv-conf"
        return Fault(details, fatal=ConfigError(f"etcd at {settings.where} {advice}"))
    if code == status.UNAUTHENTICATED or "auth store is old" in details:
        return Fault(details, login=True, fatal=ConfigError(f"{who}: not let in: {details}"))
    if code == status.PERMISSION_DENIED:
        return Fault(details, login=True, fatal=ConfigError(f"{who}: no permission for keys under /leto/"))
    if code == status.RESOURCE_EXHAUSTED and "requests" in details:
        return Fault(details)  # too many requests at once, as opposed to: no space
    return Fault(details, fatal=EtcdRefused(f"etcd at {settings.where} refused a request: {details or code.name}"))


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path} for etcd: {error.strerror}") from error
