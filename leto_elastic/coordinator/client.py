"""etcd as this package needs it, and no wider: read, write, compare-and-swap, watch, leases.

Guarantees, each checked by a test against a real server that is killed, restarted and compacted:
  * a call returns the server's answer or raises; none waits longer than its `timeout`;
  * `watch` and `follow` deliver every event once and in order of revision, over restarts of the server, and never
    hang silently: what was compacted away is reported (`watch`) or replaced by a new snapshot (`follow`);
  * a `Lease` is renewed until it is revoked, the client is closed or the server says that it is gone (`lost`);
  * `close` leaves no task and no socket behind.

Not guaranteed: that a write happened once. A write whose answer was lost is sent again, so callers must tell by the
content of a key whether a failed comparison is due to themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from leto_elastic.coordinator import stubs
from leto_elastic.coordinator.connection import (
    Connection,
    EtcdClosed,
    EtcdRefused,
    EtcdUnavailable,
    Link,
)
from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.errors import LetoError

_BACKOFF_FIRST, _BACKOFF_LAST = 0.02, 0.5


class Compacted(LetoError):
    """The events that a watch should begin with are not kept any more; read the keys instead."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it stands; `lease` 0: bound to none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a key; `entry` None: it was deleted."""

    key: str
    entry: KeyValue | None
    revision: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys of a prefix, in order, at one revision."""

    revision: int
    entries: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Events in order; `revision` is the last one's."""

    revision: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a transaction: whether it was carried out, at which revision, and else the keys compared, as they stand."""

    done: bool
    revision: int
    current: dict[str, KeyValue] = field(default_factory=dict)


# ---- what a transaction compares and does


@dataclass(frozen=True, slots=True)
class Missing:
    """The key does not exist."""

    key: str


@dataclass(frozen=True, slots=True)
class Holds:
    """The key has this value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Created:
    """The key is the one that was created at this revision."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class NoneSince:
    """No key of this prefix was created after this revision."""

    prefix: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write; bound to a lease unless 0."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key."""

    key: str


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    """Delete all keys of a prefix."""

    prefix: str


Condition = Missing | Holds | Created | NoneSince
Operation = Put | Delete | DeletePrefix


class Lease:
    """A lease that is being renewed. `lost` is set when etcd says that it has ended; `renewed`: monotonic seconds."""

    def __init__(self, lease_id: int, ttl: int) -> None:
        self.id = lease_id
        self.ttl = ttl
        self.lost = asyncio.Event()
        self.renewed = time.monotonic()


class EtcdClient:
    """See the module. Made by `open`; every `timeout` is in seconds, None: until cancelled or closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._renewals: dict[int, asyncio.Task[None]] = {}

    @classmethod
    async def open(
        cls, settings: EtcdSettings, *, timeout: float, request_timeout: float | None = None, check_key: str = "/leto/"
    ) -> EtcdClient:
        """Connect.

        Args:
            settings: where, and how to be let in.
            timeout: for the whole of it.
            request_timeout: longest wait for one answer before another attempt; `timeout` by default.
            check_key: a key that this user may read.

        Raises ConfigError that says what is wrong with the endpoint, the certificates or the user.
        """
        connection = Connection(settings, request_timeout or timeout)
        try:
            await connection.open(check_key, timeout)
        except BaseException:  # boundary: closed, then raised
            await connection.close()
            raise
        return cls(connection)

    @property
    def settings(self) -> EtcdSettings:
        """What the client was opened with."""
        return self._connection.settings

    async def get(self, key: str, *, timeout: float | None) -> KeyValue | None:
        """A key, or None."""
        response = await self._connection.call(lambda link: link.kv.get(key), timeout)
        return _entry(response.kvs[0]) if response.kvs else None

    async def get_prefix(self, prefix: str, *, timeout: float | None) -> Snapshot:
        """All keys that start with `prefix`."""
        end = stubs.prefix_range_end(prefix)
        response = await self._connection.call(lambda link: link.kv.get(prefix, end), timeout)
        return Snapshot(response.header.revision, tuple(_entry(kv) for kv in response.kvs))

    async def put(self, key: str, value: bytes, *, lease: int = 0, timeout: float | None) -> int:
        """Write a key; the revision. Raises EtcdRefused when the lease has ended."""
        response = await self._connection.call(lambda link: link.kv.put(key, value, lease), timeout)
        return int(response.header.revision)

    async def delete(self, key: str, *, timeout: float | None) -> bool:
        """Delete a key; False: there was none."""
        response = await self._connection.call(lambda link: link.kv.delete(key), timeout)
        return bool(response.deleted)

    async def delete_prefix(self, prefix: str, *, timeout: float | None) -> int:
        """Delete all keys that start with `prefix`; how many."""
        end = stubs.prefix_range_end(prefix)
        response = await self._connection.call(lambda link: link.kv.delete(prefix, end), timeout)
        return int(response.deleted)

    async def txn(
        self, conditions: Sequence[Condition], operations: Sequence[Operation], *, timeout: float | None
    ) -> Answer:
        """Do all operations in one revision if all conditions hold, else none.

        An operation must not touch a key that another one touches. Raises EtcdRefused when a lease has ended.
        """
        compare = [_compare(condition) for condition in conditions]
        success = [_operation(operation) for operation in operations]
        keys = dict.fromkeys(c.key for c in conditions if not isinstance(c, NoneSince))
        failure = [stubs.KVService.txn_op_get(key) for key in keys]
        response = await self._connection.call(lambda link: link.kv.txn(compare, success, failure), timeout)
        revision = int(response.header.revision)
        if response.succeeded:
            return Answer(True, revision)
        entries = [_entry(kv) for part in response.responses for kv in part.response_range.kvs]
        return Answer(False, revision, {entry.key: entry for entry in entries})

    async def compact(self, revision: int, *, timeout: float | None) -> None:
        """Forget all that was superseded before `revision`."""
        await self._connection.call(lambda link: link.kv.compact(revision), timeout)

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[Batch, None]:
        """Events of all keys that start with `prefix`, from `revision` on, for ever.

        Use it with `contextlib.aclosing`. Raises Compacted, ConfigError, or EtcdClosed.
        """
        backoff = _BACKOFF_FIRST
        while True:
            async with self._connection.link() as link:
                call = link.watch.Watch(metadata=link.metadata)
                try:
                    await self._start_watch(call, prefix, revision)
                    while (response := await call.read()) is not stubs.grpc.aio.EOF:
                        if not _check_watch(response, prefix, revision):
                            break
                        if response.events:
                            events = tuple(_event(event) for event in response.events)
                            revision = events[-1].revision + 1
                            yield Batch(events[-1].revision, events)
                        backoff = _BACKOFF_FIRST
                except (stubs.grpc.aio.AioRpcError, stubs.grpc.aio.UsageError, TimeoutError):
                    pass  # the server went away, or the stream with it: connect again below
                except asyncio.InvalidStateError:
                    pass  # grpc's way to say that the stream ended while it was being written to
                finally:
                    call.cancel()
                self._connection.failed(link)
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _BACKOFF_LAST)
            # Whether we are still let in is what a read finds out, with a new token if need be.
            await self._connection.call(lambda link: link.kv.get(prefix), None)

    async def follow(self, prefix: str) -> AsyncGenerator[Snapshot | Batch, None]:
        """A snapshot of a prefix, then its events; a new snapshot whenever events were compacted away.

        Use it with `contextlib.aclosing`.
        """
        while True:
            snapshot = await self.get_prefix(prefix, timeout=None)
            yield snapshot
            try:
                async with aclosing(self.watch(prefix, snapshot.revision + 1)) as batches:
                    async for batch in batches:
                        yield batch
            except Compacted:
                continue

    async def grant(self, ttl: int, *, timeout: float | None) -> Lease:
        """A lease of `ttl` seconds, renewed from now on."""
        response = await self._connection.call(lambda link: link.lease.grant(ttl), timeout)
        lease = Lease(response.ID, response.TTL)
        task = asyncio.get_running_loop().create_task(self._renew(lease), name=f"etcd lease {lease.id:x}")
        self._renewals[lease.id] = task
        return lease

    async def revoke(self, lease: Lease, *, timeout: float | None) -> None:
        """End a lease now, and delete the keys bound to it."""
        await self._stop_renewal(lease)
        lease.lost.set()
        try:
            await self._connection.call(lambda link: link.lease.revoke(lease.id), timeout)
        except EtcdRefused:
            pass  # it had ended already

    async def close(self) -> None:
        """Close. Leases are not revoked; calls and watches under way end with EtcdClosed."""
        renewals = list(self._renewals.values())
        self._renewals.clear()
        for task in renewals:
            task.cancel()
        if renewals:
            await asyncio.wait(renewals)
        await self._connection.close()

    async def _start_watch(self, call: Any, prefix: str, revision: int) -> None:
        request = stubs.WatchCreateRequest(
            key=prefix.encode(), range_end=stubs.prefix_range_end(prefix), start_revision=revision
        )
        async with asyncio.timeout(self._connection.attempt):
            await call.write(stubs.WatchRequest(create_request=request))
            await call.initial_metadata()

    async def _renew(self, lease: Lease) -> None:
        wait = lease.ttl / 3
        while True:
            await asyncio.sleep(wait)
            try:
                remaining = await self._connection.call(lambda link: _keep_alive(link, lease.id), lease.ttl)
            except EtcdUnavailable:
                wait = 0.0  # trying again has its own backoff
                continue
            if remaining <= 0:
                lease.lost.set()
                self._renewals.pop(lease.id, None)
                return
            lease.renewed = time.monotonic()
            wait = lease.ttl / 3

    async def _stop_renewal(self, lease: Lease) -> None:
        task = self._renewals.pop(lease.id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


async def _keep_alive(link: Link, lease_id: int) -> int:
    """Renew once; the seconds granted, 0: the lease is gone."""
    call = link.lease.keep_alive(lease_id)
    try:
        response = await call.read()
        if response is stubs.grpc.aio.EOF:
            raise TimeoutError("the stream ended without an answer")
        return int(response.TTL)
    finally:
        call.cancel()


def _check_watch(response: Any, prefix: str, revision: int) -> bool:
    """False: the server ended this watch, and another may be started."""
    if response.compact_revision:
        compacted = response.compact_revision
        raise Compacted(f"events of {prefix} from revision {revision} on were compacted (to {compacted})")
    return not response.canceled


def _entry(kv: Any) -> KeyValue:
    return KeyValue(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _event(event: Any) -> Event:
    deleted = event.type == event.DELETE
    return Event(event.kv.key.decode(), None if deleted else _entry(event.kv), event.kv.mod_revision)


def _compare(condition: Condition) -> Any:
    kv = stubs.KVService
    match condition:
        case Missing(key):
            return kv.txn_compare_create_revision(key, 0)
        case Holds(key, value):
            return kv.txn_compare_value(key, value)
        case Created(key, revision):
            return kv.txn_compare_create_revision(key, revision)
        case NoneSince(prefix, revision):
            end = stubs.prefix_range_end(prefix)
            return kv.txn_compare_create_revision(prefix, revision + 1, result=stubs.Compare.LESS, range_end=end)


def _operation(operation: Operation) -> Any:
    kv = stubs.KVService
    match operation:
        case Put(key, value, lease):
            return kv.txn_op_put(key, value, lease=lease)
        case Delete(key):
            return kv.txn_op_delete(key)
        case DeletePrefix(prefix):
            return kv.txn_op_delete(prefix, range_end=stubs.prefix_range_end(prefix))


__all__ = [
    "Answer",
    "Batch",
    "Compacted",
    "Condition",
    "Created",
    "Delete",
    "DeletePrefix",
    "EtcdClient",
    "EtcdClosed",
    "EtcdRefused",
    "EtcdUnavailable",
    "Event",
    "Holds",
    "KeyValue",
    "Lease",
    "Missing",
    "NoneSince",
    "Operation",
    "Put",
    "Snapshot",
]
