"""What every agent does with etcd: be known, own the run, report failures, receive plans.

Guarantees:
  * fencing: a failure is accepted only while the job's epoch is the one it ended, and every accepted failure of an
    epoch is part of the plan that follows it;
  * etcd may be away at any time: `put_slot` never waits, `report_failure` and `plans` go on when it is back, nothing is
    lost or delivered twice;
  * a slot's state that was put before a failure was reported is known to whoever decides about it;
  * a run id has one owner at a time. A second job under the same id is refused while the first one's lease lives, and
    begins anew afterwards: nothing of a job whose agent is gone can be resumed, all its state was in that agent.

Considered and rejected: one key of the whole job's state, rewritten by everybody (as torch's c10d rendezvous does): a
failure report would then compete with every heartbeat; and a lease per key: they would not end together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from leto_elastic.coordinator.client import (
    DeletePrefix,
    EtcdClient,
    EtcdRefused,
    Holds,
    KeyValue,
    Lease,
    Missing,
    Operation,
    Put,
    Snapshot,
)
from leto_elastic.coordinator.schema import (
    BudgetRecord,
    FailureRecord,
    Keys,
    NodeRecord,
    PlanRecord,
    RunRecord,
    SlotRecord,
    decode,
    encode,
)
from leto_elastic.coordinator.settings import EtcdSettings, check_run_id
from leto_elastic.errors import ConfigError, LetoError
from leto_elastic.recovery.policy import Policy


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

    async def begin(self) -> int:
        """Become the owner of the run, after `register`; the epoch, which is 0.

        Raises ConfigError when another agent owns it and has not gone within `deadlines.etcd`.
        """
        deadline = time.monotonic() + self.policy.deadlines.etcd
        while True:
            entry = await self.client.get(self.keys.run, timeout=max(0.1, deadline - time.monotonic()))
            owner = None if entry is None else decode(entry.key, entry.value, RunRecord).owner
            if owner is not None and owner != self.node_id and not await self._gone(owner, deadline):
                raise ConfigError(
                    f"run id {self.run_id!r} is in use by agent {owner} on etcd at {self.client.settings.where}: "
                    "give another --rdzv-id, or end that job first"
                )
            if owner == self.node_id or await self._take(entry, owner, deadline):
                return 0

    async def put_slot(self, slot: int, record: SlotRecord) -> None:
        """Make the state of a slot known. Returns at once; the newest state is written as soon as etcd takes it."""
        self._slots[slot] = record
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

    async def plans(self, after: int = 0) -> AsyncGenerator[PlanRecord, None]:
        """Every plan of an epoch above `after`, each once and in order, for ever. Use it with `aclosing`."""
        async with aclosing(self.client.follow(self.keys.plans)) as views:
            async for view in views:
                entries = view.entries if isinstance(view, Snapshot) else [e.entry for e in view.events if e.entry]
                for entry in entries:
                    plan = decode(entry.key, entry.value, PlanRecord)
                    if plan.epoch > after:
                        after = plan.epoch
                        yield plan

    async def finish(self, state: Literal["succeeded", "failed"], *, timeout: float) -> None:
        """Record how the run ended, after all that is still to be written."""
        await self.flush(timeout)
        entry = await self.client.get(self.keys.run, timeout=timeout)
        if entry is not None:
            run = decode(entry.key, entry.value, RunRecord)
            ended = encode(RunRecord(owner=run.owner, started=run.started, state=state))
            await self.client.txn([Holds(entry.key, entry.value)], [Put(entry.key, ended)], timeout=timeout)

    async def lease(self) -> Lease:
        """The lease of this node, once it has one."""
        while self._lease is None or self._lease.lost.is_set():
            self._leased.clear()
            await self._leased.wait()
        return self._lease

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

    # ---- ownership

    async def _gone(self, owner: str, deadline: float) -> bool:
        """Wait until the lease of another owner has ended; False: it lives on at the deadline."""
        key = self.keys.node(owner)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                async with aclosing(self.client.follow(key)) as views:
                    async for view in views:
                        if isinstance(view, Snapshot):
                            present = any(entry.key == key for entry in view.entries)
                        else:
                            present = any(event.key == key and event.entry is not None for event in view.events)
                        if not present:
                            return True
        except TimeoutError:
            pass
        return False

    async def _take(self, entry: KeyValue | None, owner: str | None, deadline: float) -> bool:
        """Begin the run with nothing in it; False: somebody else was faster, or the answer got lost."""
        record = RunRecord(owner=self.node_id, started=time.time())
        operations: list[Operation] = [
            Put(self.keys.run, encode(record)),
            Put(self.keys.epoch, _number(0)),
            Put(self.keys.budget, encode(BudgetRecord())),
        ]
        operations += [DeletePrefix(prefix) for prefix in (self.keys.slots, self.keys.failures, self.keys.plans)]
        unchanged = Missing(self.keys.run) if entry is None else Holds(entry.key, entry.value)
        conditions = [unchanged] if owner is None else [unchanged, Missing(self.keys.node(owner))]
        answer = await self.client.txn(conditions, operations, timeout=max(0.1, deadline - time.monotonic()))
        return answer.done

    # ---- slots

    async def _write_slots(self) -> None:
        while self._slots:
            slots, self._slots = self._slots, {}
            puts = [Put(self.keys.slot(slot), encode(record)) for slot, record in slots.items()]
            await self.client.txn([], puts, timeout=None)


def _number(epoch: int) -> bytes:
    return str(epoch).encode()
