"""Who decides what to do about a failure: the interface that the supervisor uses.

`EtcdDecider` is what a job uses: records and plans in etcd, one leader per job. `Alone` decides in this process, with
the same policy and the same collecting of failures, for tests of the agent that need no etcd.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from leto_elastic.launch.actions import Death
from leto_elastic.launch.job import PlanView
from leto_elastic.recovery.policy import Failure, JobView, PastRecovery, Policy, ShadowState, decide
from leto_elastic.wire import StoreAddress

OnPlan = Callable[[PlanView], None]
MakeStore = Callable[[int], Awaitable[tuple[str, int]]]


@dataclass(frozen=True, slots=True)
class SlotState:
    """What the leader must know of a slot."""

    slot: int
    rank: int
    pid: int
    leto: bool
    protected: bool
    shadow: ShadowState
    finished: bool


class Decider(Protocol):
    """Takes failure records, gives plans. Records and reports take effect in the order of the calls."""

    async def open(self, on_plan: OnPlan, make_store: MakeStore, on_error: Callable[[BaseException], None]) -> int:
        """Start; the epoch of the job. `on_plan` is called for every later plan, in order."""
        ...

    def publish(self, state: SlotState) -> None:
        """A slot changed."""
        ...

    def report(self, epoch: int, death: Death) -> None:
        """A rank failed in `epoch`; of no effect when the job's epoch is another one by now."""
        ...

    async def close(self, succeeded: bool) -> None:
        """Stop; also after `open` failed half-way."""
        ...


class Alone:
    """Decides in this process."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._epoch = 0
        self._slots: dict[int, SlotState] = {}
        self._pending: list[Death] = []
        self._history: list[PastRecovery] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, on_plan: OnPlan, make_store: MakeStore, on_error: Callable[[BaseException], None]) -> int:
        self._on_plan, self._make_store, self._on_error = on_plan, make_store, on_error
        return self._epoch

    def publish(self, state: SlotState) -> None:
        self._slots[state.slot] = state

    def report(self, epoch: int, death: Death) -> None:
        if epoch != self._epoch:
            return
        self._pending.append(death)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._policy.coordinator.collect_ms / 1000, self._start_deciding)

    def _start_deciding(self) -> None:
        task = asyncio.get_running_loop().create_task(self._decide())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _decide(self) -> None:
        self._timer = None
        deaths, self._pending = self._pending, []
        shadows: Mapping[int, ShadowState] = {state.slot: state.shadow for state in self._slots.values()}
        now = time.time()
        view = JobView(
            epoch=self._epoch,
            step_of_failure=max(death.step for death in deaths),
            failures=tuple(Failure(death.rank, death.slot, death.cause, death.step) for death in deaths),
            shadows=shadows,
            protected=all(state.protected for state in self._slots.values()),
            leto_job=True,
            finished=any(state.finished for state in self._slots.values()),
            history=tuple(self._history),
            now=now,
            restarts_left=0,
            budget=self._policy.limits.per_job - len(self._history),
        )
        decision = decide(self._policy, view)
        self._epoch += 1
        self._history.append(PastRecovery(self._epoch, view.step_of_failure, now, len(deaths)))
        host, port = await self._make_store(self._epoch)
        repairs = {repair.slot: repair.action for repair in decision.repairs}
        plan = PlanView(self._epoch, decision.action, repairs, StoreAddress(host, port), decision.reason)
        self._on_plan(plan)

    async def close(self, succeeded: bool) -> None:  # noqa: ARG002  (nobody to tell)
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
