"""Who decides what to do about a failure: the interface that the supervisor uses.

`EtcdDecider` is what a job uses: records and plans in etcd, one leader per job. `Alone` decides in this process, with
the same policy and the same collecting of failures, for tests of the agent that need no etcd.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from leto_elastic.coordinator.coordinator import MakeStore
from leto_elastic.launch.actions import Death
from leto_elastic.launch.world import PlanView, World
from leto_elastic.recovery.ladder import Failure, JobView, PastRecovery, ShadowState, decide, remember
from leto_elastic.recovery.policy import Policy
from leto_elastic.wire import StoreAddress

STALLED = "stalled"
"""The stage that a node may come to at any time, and may take back by saying nothing (b""): its ranks stand still."""


class Ears(Protocol):
    """Who is told what was decided, and what other nodes say."""

    def plan_arrived(self, plan: PlanView) -> None:
        """A plan, in order."""
        ...

    def rank_failed(self, epoch: int, death: Death) -> None:
        """A rank failed in `epoch`, here or elsewhere; may be told again."""
        ...

    def node_gone(self, position: int) -> None:
        """The node at a position has left or is not heard of any more."""
        ...

    def met(self, epoch: int, stage: str, said: Mapping[int, bytes]) -> None:
        """All nodes have come to a stage of an epoch; what they said, by position. Of `STALLED` at each change."""
        ...

    def ended(self, reason: str | None) -> None:
        """Another node has ended the job, by a failure or (None) with success."""
        ...

    def broken(self, error: BaseException) -> None:
        """Deciding cannot go on."""
        ...


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

    async def open(self, ears: Ears, make_store: MakeStore) -> PlanView:
        """Take part; returns once the job has begun, with its newest plan. `ears` hears of what comes later."""
        ...

    def publish(self, state: SlotState) -> None:
        """A slot changed."""
        ...

    def report(self, epoch: int, death: Death) -> None:
        """A rank failed in `epoch`; of no effect when the job's epoch is another one by now."""
        ...

    def say(self, epoch: int, stage: str, payload: bytes) -> None:
        """This node has come to a stage on the way into an epoch."""
        ...

    @property
    def silence(self) -> float:
        """Seconds since whoever decides was last heard."""
        ...

    async def close(self, succeeded: bool | None, reason: str = "") -> None:
        """Stop, also after `open` failed half-way. `succeeded` None: this node leaves, the job may go on without it."""
        ...


class Alone:
    """Decides in this process."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self._policy = policy
        self._world = World.alone(slots)
        self._epoch = 0
        self._slots: dict[int, SlotState] = {}
        self._pending: list[Death] = []
        self._history: list[PastRecovery] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, ears: Ears, make_store: MakeStore) -> PlanView:
        self._ears, self._make_store = ears, make_store
        host, port = await make_store(0)
        return PlanView(0, "start", {}, StoreAddress(host, port), "", self._world)

    def publish(self, state: SlotState) -> None:
        self._slots[state.rank] = state

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
        shadows: Mapping[int, ShadowState] = {state.rank: state.shadow for state in self._slots.values()}
        now = time.time()
        view = JobView(
            epoch=self._epoch,
            step_of_failure=max(death.step for death in deaths),
            failures=tuple(
                Failure(death.rank, death.rank, death.cause, death.step, death.held, death.digest, death.detail)
                for death in deaths
            ),
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
        self._history.append(remember(view, decision))
        host, port = await self._make_store(self._epoch)
        repairs = {repair.slot: repair.action for repair in decision.repairs}
        action: Any = decision.action
        address = StoreAddress(host, port)
        view_of_plan = PlanView(self._epoch, action, repairs, address, decision.reason, self._world, skip=decision.skip)
        self._ears.plan_arrived(view_of_plan)

    def say(self, epoch: int, stage: str, payload: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._ears.met, epoch, stage, {0: payload})

    silence = 0.0

    async def close(self, succeeded: bool | None, reason: str = "") -> None:  # noqa: ARG002  (nobody to tell)
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
