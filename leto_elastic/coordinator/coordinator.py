"""What every agent does with etcd: be known, own the run, report failures, receive plans.

Guarantees:
  * fencing: a failure is accepted only while the job's epoch is the one it ended, and every accepted failure of an
    epoch is part of the plan that follows it;
  * etcd may be away at any time: `put_slot` never waits, `report_failure` and `plans` go on when it is back, nothing is
    lost or delivered twice;
  * a slot's state that was put before a failure was reported is known to whoever decides about it;
  * a run id is one job at a time. Whoever comes while a member of it lives is a spare, or refused when there are as
    many nodes as may be. It begins anew when all members are gone: nothing of such a job can be resumed, all its state
    was in their memory.

Considered and rejected: one key of the whole job's state, rewritten by everybody (as torch's c10d rendezvous does): a
failure report would then compete with every heartbeat; and a lease per key: they would not end together.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Literal, Protocol

import msgspec

from leto_elastic.coordinator.client import (
    Condition,
    Created,
    Delete,
    DeletePrefix,
    EtcdClient,
    EtcdRefused,
    Holds,
    Lease,
    Missing,
    Operation,
    Put,
    Snapshot,
)
from leto_elastic.coordinator.roster import Came, Ended, Failed, Gone, News, Present, Roster, Said
from leto_elastic.coordinator.schema import (
    BudgetRecord,
    FailureRecord,
    Keys,
    NodeRecord,
    PlanRecord,
    RunRecord,
    Seat,
    ShardRecord,
    SlotRecord,
    decode,
    encode,
)
from leto_elastic.coordinator.settings import EtcdSettings, check_run_id
from leto_elastic.errors import ConfigError, LetoError
from leto_elastic.recovery.policy import Policy


class MakeStore(Protocol):
    """Makes the c10d store of an epoch; its host and port. May be called again for an epoch, and in vain.

    `fresh`: nothing may be left in it from earlier epochs.
    """

    def __call__(self, epoch: int, fresh: bool = False, /) -> Awaitable[tuple[str, int]]: ...


class Coordinator:
    """See the module. Made by `open`.

    Args:
        client: connected.
        run_id: `--rdzv-id`.
        node_id: of this agent process, never used by another one.
        policy: deadlines and the lease.
    """

    def __init__(self, client: EtcdClient, run_id: str, node_id: str, policy: Policy) -> None:
        self.client = client
        self.run_id = run_id
        self.node_id = node_id
        self.policy = policy
        self.keys = Keys(run_id)
        self._lease: Lease | None = None
        self._leased = asyncio.Event()
        self._slots: dict[int, SlotRecord] = {}
        self._shards: dict[int, ShardRecord] = {}
        self._writer: asyncio.Task[None] | None = None
        self._member: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, settings: EtcdSettings, run_id: str, node_id: str, policy: Policy) -> Coordinator:
        """Connect, within `deadlines.etcd`. Raises ConfigError that says what is wrong."""
        check_run_id(run_id, settings)
        timeout = policy.deadlines.etcd
        client = await EtcdClient.open(settings, timeout=timeout, check_key=Keys(run_id).run)
        return cls(client, run_id, node_id, policy)

    async def register(self, record: NodeRecord) -> None:
        """Make this node known for as long as this process lives (`coordinator.lease`)."""
        await self._join(record, self.policy.deadlines.etcd)
        self._member = asyncio.get_running_loop().create_task(self._stay(record), name="etcd membership")

    async def secret(self) -> bytes:
        """32 random bytes, the same for all agents of this run id, by which their keepers know each other."""
        timeout = self.policy.deadlines.etcd
        await self.client.txn(
            [Missing(self.keys.secret)], [Put(self.keys.secret, secrets.token_hex(32).encode())], timeout=timeout
        )
        entry = await self.client.get(self.keys.secret, timeout=timeout)
        if entry is None:
            raise ConfigError(f"etcd at {self.client.settings.where} does not keep {self.keys.secret}")
        return bytes.fromhex(entry.value.decode())

    async def meet(self, make_store: MakeStore, *, least: int = 1, most: int = 1) -> PlanRecord:
        """Take part in the run, after `register`: as one of its members, or as a spare when it has enough of them.

        The first `least` nodes begin it, once they are there. A run that has a living member is never begun anew.

        Returns its newest plan.

        Args:
            make_store: makes the store of epoch 0, should this node be the one that begins.
            least: nodes that take part.
            most: nodes that may be there, spares included.

        Raises:
            ConfigError: too few nodes came within `deadlines.meet`; or the run has as many as it may have, and none of
                them has gone within `deadlines.etcd`.
        """
        roster = Roster(self.keys, self.node_id)
        loop = asyncio.get_running_loop()
        crowded = loop.time() + self.policy.deadlines.etcd
        enough = loop.time() + self.policy.deadlines.meet
        try:
            async with asyncio.timeout_at(crowded) as limit, aclosing(self.client.follow(self.keys.root)) as views:
                async for view in views:
                    roster.apply(view)
                    limit.reschedule(crowded if roster.running or least == 1 else enough)
                    if roster.member or (roster.running and len(roster.nodes) <= most):
                        assert roster.plan is not None
                        return roster.plan
                    chosen = roster.fresh()[:least]
                    if not roster.running and len(chosen) == least and chosen[0] == self.node_id:
                        await self._begin(roster, chosen, await make_store(0))
        except TimeoutError:
            pass
        raise ConfigError(self._alone(roster, least, most))

    def _alone(self, roster: Roster, least: int, most: int) -> str:
        where = self.client.settings.where
        if roster.running:
            assert roster.run is not None
            return (
                f"run id {self.run_id!r} is in use by agent {roster.run.owner} on etcd at {where}"
                f"{f', with {most} nodes, all that --nnodes allows' if most > 1 else ''}: give another --rdzv-id, or "
                "end that job first"
            )
        hosts = ", ".join(sorted(record.host for record in roster.nodes.values()))
        return (
            f"{len(roster.fresh())} of {least} nodes came within {self.policy.deadlines.meet:g} s (deadlines.meet) to "
            f"run {self.run_id!r} on etcd at {where}: {hosts}"
        )

    async def _begin(self, roster: Roster, chosen: list[str], store: tuple[str, int]) -> None:
        """Begin the run with nothing in it; without effect when something has changed meanwhile."""
        keys = self.keys
        run = RunRecord(owner=self.node_id, started=time.time())
        start = PlanRecord(
            epoch=0,
            action="start",
            repairs=(),
            store_host=store[0],
            store_port=store[1],
            reason="",
            failures=(),
            step=0,
            time=run.started,
            nodes=tuple(Seat.of(node, roster.nodes[node]) for node in chosen),
        )
        operations: list[Operation] = [
            Put(keys.run, encode(run)),
            Put(keys.start, encode(start)),
            Put(keys.epoch, _number(0)),
            Put(keys.budget, encode(BudgetRecord())),
        ]
        left = (keys.slots, keys.failures, keys.plans, keys.meetings, keys.shards)
        operations += [DeletePrefix(prefix) for prefix in left]
        conditions: list[Condition] = [Missing(keys.run) if roster.entry is None else Holds(keys.run, roster.entry)]
        conditions += [Missing(keys.node(node)) for node in roster.members if node not in chosen]
        conditions += [Created(keys.node(node), roster.revisions[node]) for node in chosen]
        await self.client.txn(conditions, operations, timeout=self.policy.deadlines.etcd)

    async def put_slot(self, slot: int, record: SlotRecord) -> None:
        """Make the state of a slot known. Returns at once; the newest state is written as soon as etcd takes it."""
        self._slots[slot] = record
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write_slots(), name="etcd slots")

    async def put_shard(self, record: ShardRecord) -> None:
        """Make the protected state of a slot known, as `put_slot`."""
        self._shards[record.rank] = record
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write_slots(), name="etcd slots")

    async def flush(self, timeout: float | None) -> None:
        """Wait until all that was put is written. Raises LetoError when it is not within `timeout` s."""
        if self._writer is None:
            return
        if not self._writer.done():
            await asyncio.wait([self._writer], timeout=timeout)
        if not self._writer.done():
            where = self.client.settings.where
            raise LetoError(f"etcd at {where} did not take the state of the slots within {timeout:g} s")
        self._writer.result()

    async def report_failure(self, epoch: int, record: FailureRecord) -> bool:
        """Report that a rank failed in `epoch`; goes on trying while etcd is away, until cancelled or closed.

        True: it is (or was already) accepted, and the plan of `epoch`+1 will take care of it. False: the epoch is over,
        and this failure is not part of the plan that ended it; look at the worker again in the new epoch.
        """
        await self.flush(None)
        key, value = self.keys.failure(epoch, record.rank), encode(record)
        answer = await self.client.txn(
            [Missing(key), Holds(self.keys.epoch, _number(epoch))], [Put(key, value)], timeout=None
        )
        return answer.done or key in answer.current

    async def depose(self, node: str) -> None:
        """Do not wait for the lease of a leader whose process is dead. One that lives after all can write nothing more
        before it has been elected again.
        """
        leader = self.keys.leader
        await self.client.txn([Holds(leader, node.encode())], [Delete(leader)], timeout=None)

    async def news(self, after: int = 0) -> AsyncGenerator[News, None]:
        """What happens to the run, for ever: plans of epochs above `after`, each once and in order; the rest possibly
        again after an absence of etcd. Use it with `aclosing`.
        """
        keys = self.keys
        async with aclosing(self.client.follow(keys.root)) as views:
            async for view in views:
                if isinstance(view, Snapshot):
                    known = {entry.key for entry in view.entries}
                    yield Present(frozenset(keys.node_of(key) for key in known if key.startswith(keys.nodes)))
                    changes: list[tuple[str, bytes | None]] = [(entry.key, entry.value) for entry in view.entries]
                    changes.sort(key=lambda change: not change[0].startswith(keys.plans))
                else:
                    changes = [(event.key, event.entry.value if event.entry else None) for event in view.events]
                for key, value in changes:
                    piece = _read(keys, key, value)
                    if isinstance(piece, PlanRecord):
                        if piece.epoch <= after:
                            continue
                        after = piece.epoch
                    if piece is not None:
                        yield piece

    async def plans(self, after: int = 0) -> AsyncGenerator[PlanRecord, None]:
        """The plans of `news`."""
        async with aclosing(self.news(after)) as news:
            async for piece in news:
                if isinstance(piece, PlanRecord):
                    yield piece

    async def say(self, epoch: int, stage: str, position: int, payload: bytes) -> None:
        """Tell the other nodes something on the way into an epoch; waits while etcd is away."""
        await self.flush(None)
        await self.client.put(self.keys.meeting(epoch, stage, position), payload, timeout=None)

    async def finish(self, state: Literal["succeeded", "failed"], *, timeout: float, reason: str = "") -> None:
        """Record how the run ended, after all that is still to be written. A failure is never overwritten."""
        await self.flush(timeout)
        entry = await self.client.get(self.keys.run, timeout=timeout)
        if entry is not None:
            run = decode(entry.key, entry.value, RunRecord)
            if run.state == "failed":
                return
            ended = encode(msgspec.structs.replace(run, state=state, reason=reason))
            await self.client.txn([Holds(entry.key, entry.value)], [Put(entry.key, ended)], timeout=timeout)

    async def lease(self) -> Lease:
        """The lease of this node, once it has one."""
        while self._lease is None or self._lease.lost.is_set():
            self._leased.clear()
            await self._leased.wait()
        return self._lease

    @property
    def silence(self) -> float:
        """Seconds since etcd has last answered to this node's lease."""
        return 0.0 if self._lease is None else time.monotonic() - self._lease.renewed

    async def close(self, *, timeout: float = 1.0) -> None:
        """Leave: end the lease (if etcd answers within `timeout` s) and the connection, and every task."""
        tasks = [task for task in (self._member, self._writer) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._lease is not None and not self._lease.lost.is_set():
            try:
                await self.client.revoke(self._lease, timeout=timeout)
            except LetoError:
                pass  # it ends by itself
        await self.client.close()

    # ---- membership

    async def _join(self, record: NodeRecord, timeout: float | None) -> None:
        lease = await self.client.grant(self.policy.coordinator.lease, timeout=timeout)
        await self.client.put(self.keys.node(self.node_id), encode(record), lease=lease.id, timeout=timeout)
        self._lease = lease
        self._leased.set()

    async def _stay(self, record: NodeRecord) -> None:
        """Join again whenever the lease has ended, as it does when etcd or this machine was away for too long."""
        while True:
            if self._lease is not None:
                await self._lease.lost.wait()
            try:
                await self._join(record, None)
            except EtcdRefused:
                continue  # the new lease ended before it was used

    # ---- slots

    async def _write_slots(self) -> None:
        while self._slots or self._shards:
            slots, self._slots = self._slots, {}
            shards, self._shards = self._shards, {}
            puts = [Put(self.keys.slot(slot), encode(record)) for slot, record in slots.items()]
            puts += [Put(self.keys.shard(slot), encode(shard)) for slot, shard in shards.items()]
            await self.client.txn([], puts, timeout=None)


def _read(keys: Keys, key: str, value: bytes | None) -> News | None:
    """A key as news, None for a key that is none; no value: it was deleted."""
    if key.startswith(keys.nodes):
        return Gone(keys.node_of(key)) if value is None else Came(keys.node_of(key))
    if value is None:
        return None
    if key.startswith(keys.plans):
        return decode(key, value, PlanRecord)
    if key.startswith(keys.failures):
        epoch = key.removeprefix(keys.failures).partition("/")[0]
        return Failed(int(epoch), decode(key, value, FailureRecord))
    if key.startswith(keys.meetings):
        epoch, stage, position = key.removeprefix(keys.meetings).split("/")
        return Said(int(epoch), stage, int(position), value)
    if key == keys.run:
        run = decode(key, value, RunRecord)
        return Ended(run.state, run.reason) if run.state != "running" else None
    return None


def _number(epoch: int) -> bytes:
    return str(epoch).encode()
