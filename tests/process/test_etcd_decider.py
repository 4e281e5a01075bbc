"""A node that comes while the job repairs itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest

from leto_elastic.coordinator.client import Put
from leto_elastic.coordinator.coordinator import Coordinator
from leto_elastic.coordinator.embedded import EmbeddedEtcd
from leto_elastic.coordinator.schema import FailureRecord, NodeRecord, PlanRecord, Seat, encode
from leto_elastic.launch.actions import Death
from leto_elastic.launch.etcd_decider import EtcdDecider
from leto_elastic.launch.world import PlanView
from leto_elastic.recovery.policy import CoordinatorPolicy, FailureClass, Policy
from tests.process.etcd_server import LIMIT, run

pytestmark = pytest.mark.process

POLICY = Policy(coordinator=CoordinatorPolicy(lease=2))
NODE = NodeRecord(host="h", pid=1, slots=1)


class Heard:
    """`Ears` that keep the plans."""

    def __init__(self) -> None:
        self.plans: asyncio.Queue[PlanView] = asyncio.Queue()

    def plan_arrived(self, plan: PlanView) -> None:
        self.plans.put_nowait(plan)

    def rank_failed(self, epoch: int, death: Death) -> None:
        """Not of interest here."""

    def node_gone(self, position: int) -> None:
        """Not of interest here."""

    def met(self, epoch: int, stage: str, said: Mapping[int, bytes]) -> None:
        """Not of interest here."""

    def ended(self, reason: str | None) -> None:
        raise AssertionError(reason)

    def broken(self, error: BaseException) -> None:
        raise error


async def store(_epoch: int, _fresh: bool = False) -> tuple[str, int]:
    return "127.0.0.1", 1


def test_a_node_that_has_a_place_before_it_has_come_in_takes_it_as_a_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader writes the plan between the node's registration and its first look at the run."""
    register = Coordinator.register

    async def placed(self: Coordinator, record: NodeRecord) -> None:
        await register(self, record)
        if self.node_id == "a":
            return
        failure = FailureRecord(rank=1, slot=1, pid=0, cause=FailureClass.NODE, step=7)
        plan = PlanRecord(
            epoch=1,
            action="repair",
            repairs=(),
            store_host="127.0.0.1",
            store_port=1,
            reason="",
            failures=(failure,),
            step=7,
            time=time.time(),
            nodes=(Seat.of("a", NODE), Seat.of(self.node_id, record)),
            generation=1,
        )
        writes = [Put(self.keys.plan(1), encode(plan)), Put(self.keys.epoch, b"00000001")]
        assert (await self.client.txn([], writes, timeout=LIMIT)).done

    monkeypatch.setattr(Coordinator, "register", placed)

    async def test() -> None:
        etcd = await EmbeddedEtcd.start(timeout=LIMIT)
        first = await Coordinator.open(etcd.settings, "job", "a", POLICY)
        decider = EtcdDecider(etcd.settings, "job", NODE, (1, 3), POLICY, 0)
        heard: Any = Heard()
        try:
            await first.register(NODE)
            assert (await first.meet(store, least=1, most=3)).epoch == 0
            begins = await decider.open(heard, store)
            assert (begins.epoch, begins.world.position) == (0, None), "it does not begin to train"
            plan = await asyncio.wait_for(heard.plans.get(), LIMIT)
            assert (plan.epoch, plan.action, plan.world.position) == (1, "repair", 1)
            assert [death.cause for death in plan.deaths] == [FailureClass.NODE]
        finally:
            await decider.close(None)
            await first.close()
            await etcd.stop()

    run(test)
