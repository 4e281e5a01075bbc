"""`Decider` by etcd: the coordinator's records, one leader per job, and a server of our own when none is given."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec

from leto_elastic.coordinator.coordinator import Coordinator, MakeStore
from leto_elastic.coordinator.embedded import EmbeddedEtcd
from leto_elastic.coordinator.leader import Leader
from leto_elastic.coordinator.roster import Came, Ended, Failed, Gone, News, Present, Said
from leto_elastic.coordinator.schema import FailureRecord, NodeRecord, PlanRecord, ShardRecord, SlotRecord
from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.errors import LetoError
from leto_elastic.launch.actions import Death
from leto_elastic.launch.deciding import STALLED, Ears, SlotState
from leto_elastic.launch.world import PlanView, World, code_of, met, position_among
from leto_elastic.recovery.policy import Policy
from leto_elastic.wire import StoreAddress

_FAREWELL = 1.0
"""Seconds for the last words to an etcd that may be away."""


class EtcdDecider:
    """See `leto_elastic.launch.deciding.Decider`.

    Args:
        settings: of a given etcd; None starts one.
        run_id: `--rdzv-id`.
        node: this node's record.
        nodes: least and most nodes.
        policy: deadlines, lease.
        max_restarts: whole-group restarts of scripts that never call `leto.init()`.
    """

    def __init__(
        self,
        settings: EtcdSettings | None,
        run_id: str,
        node: NodeRecord,
        nodes: tuple[int, int],
        policy: Policy,
        max_restarts: int,
    ) -> None:
        self._settings = settings
        self._run_id = run_id
        self._node = node
        self._nodes = nodes
        self._policy = policy
        self._max_restarts = max_restarts
        self._embedded: EmbeddedEtcd | None = None
        self._coordinator: Coordinator | None = None
        self._leader: Leader | None = None
        self._plan = PlanView(-1, "start", {}, StoreAddress("", 0), "", World((), None))
        self._said: dict[str, dict[int, bytes]] = {}
        self._left: set[str] = set()  # nodes that had places
        self._waiting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self.make_keeper: Callable[[str, bytes], int] | None = None  # (node id, the job's secret) -> port

    async def open(self, ears: Ears, make_store: MakeStore) -> PlanView:
        self._ears, self._make_store = ears, make_store
        settings = self._settings
        if settings is None:
            self._embedded = await EmbeddedEtcd.start(timeout=self._policy.deadlines.etcd_start)
            settings = self._embedded.settings
        self._id = f"{self._node.host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        coordinator = self._coordinator = await Coordinator.open(settings, self._run_id, self._id, self._policy)
        node = self._node
        if self.make_keeper is not None:
            port = self.make_keeper(self._id, await coordinator.secret())
            node = msgspec.structs.replace(node, keeper=port)
        await coordinator.register(node)
        least, most = self._nodes
        plan = self._plan = met(self._view(await coordinator.meet(make_store, least=least, most=most)))
        self._lead()
        self._start(self._follow(coordinator, plan.epoch))
        return self._plan

    def _lead(self) -> None:
        """Stand for leader once this node takes part: a spare must not decide about a job that it may be alone in."""
        if self._leader is None and self._plan.world.position is not None:
            assert self._coordinator is not None
            self._leader = Leader(
                self._coordinator,
                make_store=self._make_store,
                max_restarts=self._max_restarts,
                code=code_of(self._policy, self._plan.world.seats) or (0, 0),
            )
            self._watch(self._leader.start())

    def publish(self, state: SlotState) -> None:
        record = SlotRecord(
            rank=state.rank,
            pid=state.pid,
            leto=state.leto,
            protected=state.protected,
            shadow=state.shadow,
            finished=state.finished,
        )
        assert self._coordinator is not None
        self._start(self._coordinator.put_slot(state.rank, record))

    def shard(self, record: ShardRecord) -> None:
        """The protected state of a slot changed."""
        assert self._coordinator is not None
        self._start(self._coordinator.put_shard(record))

    def report(self, epoch: int, death: Death) -> None:
        record = FailureRecord(
            rank=death.rank,
            slot=death.rank,
            pid=death.pid,
            cause=death.cause,
            step=death.step,
            phase=death.phase,
            chunk=death.chunk,
            time=time.time(),
            detail=death.detail,
            held=death.held,
            digest=death.digest,
        )
        assert self._coordinator is not None
        # A stale report needs nothing: the plan that made it stale does not cover the death, which the job notices.
        self._start(self._coordinator.report_failure(epoch, record))

    def say(self, epoch: int, stage: str, payload: bytes) -> None:
        position = self._plan.world.position
        assert self._coordinator is not None
        assert position is not None
        self._start(self._coordinator.say(epoch, stage, position, payload))

    def depose(self, node: str) -> None:
        """A node's process is dead; should it lead, another one shall."""
        assert self._coordinator is not None
        self._start(self._coordinator.depose(node))

    async def close(self, succeeded: bool | None, reason: str = "") -> None:
        try:
            if self._coordinator is not None:
                await self._leave(self._coordinator, succeeded, reason)
        finally:
            self._coordinator = None
            if self._embedded is not None:
                await self._embedded.stop()

    async def _leave(self, coordinator: Coordinator, succeeded: bool | None, reason: str) -> None:
        tasks = list(self._tasks)
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._leader is not None:
            await self._leader.close()
            self._leader = None
        member = self._plan.world.position is not None
        try:
            if self._embedded is None and succeeded is not None and member:
                await coordinator.finish("succeeded" if succeeded else "failed", reason=reason, timeout=_FAREWELL)
        except LetoError as error:
            print(f"leto: the end of the run is not recorded in etcd: {error}", file=sys.stderr)
        await coordinator.close(timeout=_FAREWELL)

    @property
    def silence(self) -> float:
        return 0.0 if self._coordinator is None else self._coordinator.silence

    # ---- what is heard

    async def _follow(self, coordinator: Coordinator, epoch: int) -> None:
        async with aclosing(coordinator.news(after=epoch)) as news:
            async for piece in news:
                self._hear(piece)

    def _hear(self, piece: News) -> None:
        world = self._plan.world
        match piece:
            case PlanRecord():
                self._plan = self._view(piece)
                self._said.clear()
                self._lead()
                self._ears.plan_arrived(self._plan)
            case Failed(epoch, record):
                self._ears.rank_failed(epoch, _death(record))
            case Said(epoch, stage, position, payload) if epoch == self._plan.epoch:
                said = self._said.setdefault(stage, {})
                complete = len(said) == len(world.seats)
                said[position] = payload
                if len(said) == len(world.seats) and (not complete or stage == STALLED):
                    self._ears.met(epoch, stage, dict(said))
            case Came(node):
                self._left.discard(node)
            case Gone(node):
                self._missing(node)
            case Present(nodes):
                self._left -= nodes
                for seat in world.seats:
                    if seat.node not in nodes:
                        self._missing(seat.node)
            case Ended(state, reason):
                self._ears.ended(reason if state == "failed" else None)

    def _missing(self, node: str) -> None:
        seats = self._plan.world.seats
        position = position_among(seats, node)
        if position is None or node == self._id:
            return
        self._left.add(node)
        if not self._deserted():
            self._ears.node_gone(position)
        elif self._waiting is None or self._waiting.done():
            self._waiting = asyncio.get_running_loop().create_task(self._wait_for_anybody(), name="deserted")
            self._watch(self._waiting)

    def _deserted(self) -> bool:
        """Whether no node with a place is known to be there; never so for a node that has one."""
        return self._left.issuperset(seat.node for seat in self._plan.world.seats)

    async def _wait_for_anybody(self) -> None:
        """After an absence of etcd all leases have ended, and all nodes come back: it takes them a lease at most."""
        await asyncio.sleep(self._policy.coordinator.lease)
        if self._deserted():
            self._ears.ended("all its nodes have left it")

    def _view(self, plan: PlanRecord) -> PlanView:
        repairs = {repair.slot: repair.action for repair in plan.repairs}
        world = World(plan.nodes, position_among(plan.nodes, self._id), plan.generation)
        deaths = tuple(_death(failure) for failure in plan.failures)
        store = StoreAddress(plan.store_host, plan.store_port)
        return PlanView(plan.epoch, plan.action, repairs, store, plan.reason, world, deaths, plan.skip)

    # ---- tasks

    def _start(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine; those started first take their first steps first, which keeps the order of writes."""
        self._watch(asyncio.get_running_loop().create_task(coroutine))

    def _watch(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._ears.broken(error)


def _death(record: FailureRecord) -> Death:
    """The record of a failure as the agent that saw it had it, but for the exit code."""
    r = record
    return Death(r.rank, r.slot, r.pid, 0, r.cause, r.step, r.phase, r.chunk, r.detail, r.held, r.digest)
