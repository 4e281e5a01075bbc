"""The leader of a job: the one agent that turns failures into plans.

Guarantees:
  * there is at most one plan for an epoch, and it names every failure that was accepted in the epoch before: plan,
    epoch and budget are written in one transaction that compares the leader, the epoch, and that no failure came in
    since those that the decision saw;
  * it may die between any two lines: whoever leads next finds the same records and decides again;
  * the budget and the history, which the plans themselves are, only grow, and no restart of an agent resets them.

A leader that was cut off may believe that it leads; its transaction then fails. So nothing here depends on clocks or on
when a lease is noticed to be lost.

To decide, it needs no request: it follows all keys of the run. From a reported failure to the plan it takes the
collecting (`coordinator.collect_ms`, in which the epoch's store is made) and one transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

from leto_elastic.coordinator.client import (
    Batch,
    Condition,
    Created,
    Delete,
    DeletePrefix,
    EtcdRefused,
    Event,
    Holds,
    Lease,
    Missing,
    NoneSince,
    Operation,
    Put,
    Snapshot,
)
from leto_elastic.coordinator.coordinator import Coordinator, MakeStore
from leto_elastic.coordinator.schema import (
    BudgetRecord,
    FailureRecord,
    Keys,
    NodeRecord,
    PlanRecord,
    Seat,
    SlotRecord,
    decode,
    encode,
)
from leto_elastic.recovery import ladder
from leto_elastic.recovery.ladder import Decision, JobView, PastRecovery
from leto_elastic.recovery.policy import FailureClass, Policy

Decide = Callable[[Policy, JobView], Decision]

_LATER = 0.01  # seconds after a deadline at which it has certainly passed


class Leader:
    """See the module.

    Args:
        coordinator: registered.
        make_store: of this agent.
        max_restarts: of whole groups, for jobs without `leto.init()`.
        code: RS(data, parity) over the nodes, (0, 0) for none.
        decide: pure, from the policy and the state of the job to what is done.
        clock: unix seconds.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        make_store: MakeStore,
        max_restarts: int = 0,
        code: tuple[int, int] = (0, 0),
        decide: Decide = ladder.decide,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._coordinator = coordinator
        self._client = coordinator.client
        self._keys = coordinator.keys
        self._policy = coordinator.policy
        self._make_store = make_store
        self._max_restarts = max_restarts
        self._code = code
        self._decide = decide
        self._clock = clock
        self._store: tuple[int, tuple[str, int]] | None = None
        self._task: asyncio.Task[None] | None = None
        self.leading = asyncio.Event()

    def start(self) -> asyncio.Task[None]:
        """Campaign and lead from now on. The task ends by `close`, or by an error that retrying cannot mend."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="leader")
        return self._task

    async def close(self) -> None:
        """Stop. The leadership ends with the lease of the coordinator."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            lease = await self._coordinator.lease()
            term = await self._campaign(lease)
            if term is not None:
                await self._lead(term)
                self.leading.clear()

    async def _campaign(self, lease: Lease) -> int | None:
        """Wait until nobody else leads; the revision that this leadership began at, None: try again."""
        key, name = self._keys.leader, self._coordinator.node_id.encode()
        try:
            answer = await self._client.txn([Missing(key)], [Put(key, name, lease.id)], timeout=None)
        except EtcdRefused:
            await self._client.revoke(lease, timeout=None)  # it has ended, which nobody had noticed yet
            return None
        if answer.done:
            return answer.revision
        current = answer.current[key]
        if current.lease == lease.id:
            return current.create_revision
        async with aclosing(self._client.watch(key, answer.revision + 1)) as batches:
            async for batch in batches:
                if any(event.key == key and event.entry is None for event in batch.events):
                    return None
        return None

    async def _lead(self, term: int) -> None:
        """Until somebody else leads."""
        mirror = Mirror(self._keys)
        follower = asyncio.get_running_loop().create_task(self._follow(mirror), name="leader's mirror")
        try:
            while True:
                await _either(mirror.changed, follower)
                mirror.changed.clear()
                if mirror.leader != term:
                    return
                self.leading.set()
                while mirror.epoch is not None and mirror.failures and mirror.leader == term:
                    await self._plan(mirror, mirror.epoch, term, follower)
        finally:
            follower.cancel()
            await asyncio.wait([follower])

    async def _follow(self, mirror: Mirror) -> None:
        async with aclosing(self._client.follow(self._keys.root)) as views:
            async for view in views:
                mirror.apply(view)

    async def _plan(self, mirror: Mirror, epoch: int, term: int, follower: asyncio.Task[None]) -> None:
        """Collect, decide, and write the plan that ends `epoch`."""
        collected = asyncio.get_running_loop().create_task(asyncio.sleep(self._policy.coordinator.collect_ms / 1000))
        try:
            store = await self._store_of(epoch + 1)
            await collected
        finally:
            collected.cancel()
        if mirror.epoch != epoch or mirror.leader != term:
            return
        seen, now = mirror.revision, self._clock()
        view = mirror.view(self._policy, self._max_restarts, now, self._code)
        decision = self._decide(self._policy, view)
        if decision.action == "wait":
            left = self._policy.deadlines.replace - view.waited
            mirror.changed.clear()
            await _either(mirror.changed, follower, max(0.0, left) + _LATER)
            return
        if decision.action == "restart":  # scripts of their own use keys without a prefix: nothing may be left
            store = await self._make_store(epoch + 1, True)
        plan, conditions = mirror.planned_by(decision, view, store, now)
        budget = mirror.budget_after(decision)
        operations: list[Operation] = [
            Put(self._keys.plan(epoch + 1), encode(plan)),
            Put(self._keys.epoch, str(epoch + 1).encode()),
            Put(self._keys.budget, encode(budget)),
            DeletePrefix(self._keys.meeting_of(epoch)),
        ]
        # A dead node is registered until its lease ends, and must not be taken for a spare meanwhile.
        operations += [Delete(self._keys.node(node)) for node in mirror.replaced_by(plan)]
        answer = await self._client.txn(
            [
                Created(self._keys.leader, term),
                Holds(self._keys.epoch, str(epoch).encode()),
                NoneSince(self._keys.failures_of(epoch), seen),
                *conditions,
            ],
            operations,
            timeout=None,
        )
        if answer.done:
            mirror.planned(plan, budget)
        while not answer.done and mirror.revision == seen:
            # As far as we knew it should have been done, so what made it fail arrives by the watch.
            mirror.changed.clear()
            await _either(mirror.changed, follower)

    async def _store_of(self, epoch: int) -> tuple[str, int]:
        if self._store is None or self._store[0] != epoch:
            self._store = (epoch, await self._make_store(epoch))
        return self._store[1]


class Mirror:
    """The run's keys as the leader last heard of them.

    Attributes:
        revision: of the newest change heard of.
        epoch: None before the run has begun.
        leader: revision at which the present leader became it; None: there is none.
        failures: those that ended `epoch`, by rank.
        seats: the nodes that take part, by position.
        history: the plans to repair so far.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.changed = asyncio.Event()
        self.revision = 0
        self._clear()

    def _clear(self) -> None:
        self.epoch: int | None = None
        self.leader: int | None = None
        self.failures: dict[int, FailureRecord] = {}
        self.history: list[PastRecovery] = []
        self.seats: tuple[Seat, ...] = ()
        self.generation = 0
        self.lost_since: float | None = None
        self._budget = BudgetRecord()
        self._nodes: dict[str, NodeRecord] = {}
        self._created: dict[str, int] = {}
        self._slots: dict[int, SlotRecord] = {}

    def apply(self, view: Snapshot | Batch) -> None:
        """Take a snapshot, or changes, in."""
        if isinstance(view, Snapshot):
            self._clear()
            events = [Event(entry.key, entry, entry.mod_revision) for entry in view.entries]
            # The epoch first: only its failures are kept.
            events.sort(key=lambda event: event.key != self._keys.epoch)
        else:
            events = list(view.events)
            events.sort(key=lambda event: (event.revision, event.key != self._keys.epoch))
        for event in events:
            self._apply(event)
        self.revision = max(self.revision, view.revision)
        self.changed.set()

    def _apply(self, event: Event) -> None:
        keys, key, entry = self._keys, event.key, event.entry
        if entry is None:
            if key == keys.leader:
                self.leader = None
            self._nodes.pop(keys.node_of(key), None)
        elif key == keys.epoch:
            self._enter(int(entry.value))
        elif key == keys.leader:
            self.leader = entry.create_revision
        elif key == keys.budget:
            self._budget = decode(key, entry.value, BudgetRecord)
        elif key.startswith(keys.nodes):
            node = keys.node_of(key)
            self._nodes[node] = decode(key, entry.value, NodeRecord)
            self._created[node] = entry.create_revision
        elif key.startswith(keys.slots):
            self._slots[int(key.removeprefix(keys.slots))] = decode(key, entry.value, SlotRecord)
        elif key == keys.start:
            start = decode(key, entry.value, PlanRecord)
            if self.epoch in (0, None):
                self.seats, self.generation = start.nodes, 0
        elif key.startswith(keys.plans):
            self._remember(decode(key, entry.value, PlanRecord))
        elif self.epoch is not None and key.startswith(keys.failures_of(self.epoch)):
            failure = decode(key, entry.value, FailureRecord)
            self.failures[failure.rank] = failure

    def planned(self, plan: PlanRecord, budget: BudgetRecord) -> None:
        """Our own plan was written; what the watch says of it later is the same."""
        for node in self.replaced_by(plan):
            self._nodes.pop(node, None)
        self._enter(plan.epoch)
        self._remember(plan)
        self._budget = budget

    def _enter(self, epoch: int) -> None:
        if epoch == 0 or self.epoch is None:
            self.history = []
        if epoch != self.epoch:
            self.epoch, self.failures, self.lost_since = epoch, {}, None

    def _remember(self, plan: PlanRecord) -> None:
        if plan.epoch == self.epoch:
            self.seats, self.generation = plan.nodes, plan.generation
        newest = self.history[-1].epoch if self.history else 0
        if plan.action == "repair" and plan.epoch > newest:
            causes = ladder.causes_of(plan.failures, plan.repairs)
            self.history.append(PastRecovery(plan.epoch, plan.step, plan.time, plan.count, causes, plan.skip))

    def view(self, policy: Policy, max_restarts: int, now: float, code: tuple[int, int] = (0, 0)) -> JobView:
        """What a decision about the present failures depends on."""
        failures = [self.failures[rank] for rank in sorted(self.failures)]
        slots = self._slots
        first = [sum(seat.slots for seat in self.seats[:position]) for position in range(len(self.seats))]
        gone = {f.slot for f in failures if f.cause is FailureClass.NODE}
        lost = tuple(p for p, seat in enumerate(self.seats) if gone & set(range(first[p], first[p] + seat.slots)))
        if lost and self.lost_since is None:  # as it was reported: a change of leaders does not begin the wait anew
            reported = [f.time for f in failures if f.cause is FailureClass.NODE and f.time > 0.0]
            self.lost_since = min([now, *reported])
        taken = {seat.node for seat in self.seats}
        spares = sorted((node for node in self._nodes if node not in taken), key=self._created.__getitem__)
        expected = sum(seat.slots for seat in self.seats)
        return JobView(
            epoch=self.epoch or 0,
            step_of_failure=max(failure.step for failure in failures),
            failures=tuple(
                ladder.Failure(f.rank, f.slot, f.cause, f.step, f.held, f.digest, f.detail) for f in failures
            ),
            shadows={slot: record.shadow for slot, record in slots.items()},
            protected=len(slots) >= expected and all(record.protected for record in slots.values()),
            leto_job=any(record.leto for record in slots.values()),
            finished=any(record.finished for record in slots.values()),
            history=tuple(self.history),
            now=now,
            restarts_left=max_restarts - self._budget.restarts,
            budget=policy.limits.per_job - self._budget.recoveries,
            lost=lost,
            spares=tuple(ladder.Spare(node, self._nodes[node].slots, self._domain(node)) for node in spares),
            nodes=tuple(ladder.NodeView(seat.node, seat.slots, seat.domain) for seat in self.seats),
            data=code[0],
            parity=code[1],
            waited=0.0 if self.lost_since is None else now - self.lost_since,
        )

    def replaced_by(self, plan: PlanRecord) -> list[str]:
        """The nodes that lose their places by a plan."""
        return [seat.node for seat in self.seats if seat.node not in {other.node for other in plan.nodes}]

    def _domain(self, node: str) -> str:
        return self._nodes[node].domain or node

    def planned_by(
        self, decision: Decision, view: JobView, store: tuple[str, int], now: float
    ) -> tuple[PlanRecord, list[Condition]]:
        """The record of a decision, and what must hold when it is written: that the nodes it counts on are there."""
        seats = list(self.seats)
        conditions: list[Condition] = []
        for position, node in enumerate(decision.nodes or ()):
            if node != seats[position].node:
                seats[position] = Seat.of(node, self._nodes[node], place=seats[position].place)
                conditions.append(Created(self._keys.node(node), self._created[node]))
        assert decision.action != "wait"
        afresh = any(repair.action in ("replace", "restore") for repair in decision.repairs)
        host, port = ("", 0) if decision.action in ("fail", "finish") else store
        plan = PlanRecord(
            epoch=view.epoch + 1,
            action=decision.action,
            repairs=decision.repairs,
            store_host=host,
            store_port=port,
            reason=decision.reason,
            failures=tuple(self.failures[rank] for rank in sorted(self.failures)),
            step=view.step_of_failure,
            time=now,
            nodes=tuple(seats),
            generation=view.epoch + 1 if afresh else self.generation,
            count=view.count,
            skip=decision.skip,
        )
        return plan, conditions

    def budget_after(self, decision: Decision) -> BudgetRecord:
        """The budget once a decision is carried out."""
        return BudgetRecord(
            recoveries=self._budget.recoveries + (decision.action == "repair"),
            restarts=self._budget.restarts + (decision.action == "restart"),
        )


async def _either(event: asyncio.Event, task: asyncio.Task[None], seconds: float | None = None) -> None:
    """Wait for the event, or so long. Raises what the task ends by, should it end first."""
    waiting = asyncio.get_running_loop().create_task(event.wait())
    try:
        await asyncio.wait([waiting, task], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if task.done():
        task.result()
