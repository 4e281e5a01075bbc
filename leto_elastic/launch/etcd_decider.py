"""`Decider` by etcd: the coordinator's records, one leader per job, and a server of our own when none is given."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from leto_elastic.coordinator.coordinator import Coordinator
from leto_elastic.coordinator.embedded import EmbeddedEtcd
from leto_elastic.coordinator.leader import Leader
from leto_elastic.coordinator.schema import FailureRecord, NodeRecord, PlanRecord, SlotRecord
from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.errors import LetoError
from leto_elastic.launch.actions import Death
from leto_elastic.launch.deciding import MakeStore, OnPlan, SlotState
from leto_elastic.launch.job import PlanView
from leto_elastic.recovery.policy import Policy
from leto_elastic.wire import StoreAddress

_FAREWELL = 1.0
"""Seconds for the last words to an etcd that may be away."""


class EtcdDecider:
    """See `leto_elastic.launch.deciding.Decider`.

    Args:
        settings: of a given etcd; None starts one.
        run_id: `--rdzv-id`.
        slots: workers of this node.
        policy: deadlines, lease.
        max_restarts: whole-group restarts of scripts that never call `leto.init()`.
    """

    def __init__(
        self, settings: EtcdSettings | None, run_id: str, slots: int, policy: Policy, max_restarts: int
    ) -> None:
        self._settings = settings
        self._run_id = run_id
        self._slots = slots
        self._policy = policy
        self._max_restarts = max_restarts
        self._embedded: EmbeddedEtcd | None = None
        self._coordinator: Coordinator | None = None
        self._leader: Leader | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    async def open(self, on_plan: OnPlan, make_store: MakeStore, on_error: Callable[[BaseException], None]) -> int:
        self._on_error = on_error
        settings = self._settings
        if settings is None:
            self._embedded = await EmbeddedEtcd.start(timeout=self._policy.deadlines.etcd_start)
            settings = self._embedded.settings
        node_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        coordinator = self._coordinator = await Coordinator.open(settings, self._run_id, node_id, self._policy)
        await coordinator.register(NodeRecord(host=socket.gethostname(), pid=os.getpid(), slots=self._slots))
        epoch = await coordinator.begin()
        self._leader = Leader(coordinator, make_store=make_store, max_restarts=self._max_restarts)
        self._watch(self._leader.start())
        self._start(self._follow(coordinator, epoch, on_plan))
        return epoch

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
        self._start(self._coordinator.put_slot(state.slot, record))

    def report(self, epoch: int, death: Death) -> None:
        record = FailureRecord(
            rank=death.rank,
            slot=death.slot,
            pid=death.pid,
            cause=death.cause,
            step=death.step,
            phase=death.phase,
            chunk=death.chunk,
            time=time.time(),
        )
        assert self._coordinator is not None
        # A stale report needs nothing: the plan that made it stale does not cover the death, which the job notices.
        self._start(self._coordinator.report_failure(epoch, record))

    async def close(self, succeeded: bool) -> None:
        try:
            if self._coordinator is not None:
                await self._leave(self._coordinator, succeeded)
        finally:
            if self._embedded is not None:
                await self._embedded.stop()

    async def _leave(self, coordinator: Coordinator, succeeded: bool) -> None:
        tasks = list(self._tasks)
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._leader is not None:
            await self._leader.close()
        try:
            if self._embedded is None:
                await coordinator.finish("succeeded" if succeeded else "failed", timeout=_FAREWELL)
        except LetoError as error:
            print(f"leto: the end of the run is not recorded in etcd: {error}", file=sys.stderr)
        await coordinator.close(timeout=_FAREWELL)

    async def _follow(self, coordinator: Coordinator, epoch: int, on_plan: OnPlan) -> None:
        async with aclosing(coordinator.plans(after=epoch)) as plans:
            async for plan in plans:
                on_plan(_view(plan))

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
                self._on_error(error)


def _view(plan: PlanRecord) -> PlanView:
    repairs = {repair.slot: repair.action for repair in plan.repairs}
    return PlanView(plan.epoch, plan.action, repairs, StoreAddress(plan.store_host, plan.store_port), plan.reason)
