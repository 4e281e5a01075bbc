"""Deciders of several agents on a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from leto_elastic.coordinator.coordinator import Coordinator, MakeStore
from leto_elastic.coordinator.embedded import EmbeddedEtcd
from leto_elastic.coordinator.schema import NodeRecord, PlanRecord
from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.launch.actions import Death
from leto_elastic.launch.deciding import SlotState
from leto_elastic.launch.etcd_decider import EtcdDecider
from leto_elastic.launch.world import PlanView
from leto_elastic.recovery.policy import CoordinatorPolicy, FailureClass, GlobalProtection, Policy, Protection

pytestmark = pytest.mark.process

POLICY = Policy(protect=Protection(global_=GlobalProtection(parity=1)), coordinator=CoordinatorPolicy(lease=2))
LIMIT = 30.0


class Listener:
    """Keeps the plans."""

    def __init__(self) -> None:
        self.plans: asyncio.Queue[PlanView] = asyncio.Queue()
        self.ends: asyncio.Queue[str | None] = asyncio.Queue()
        self.error: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def plan_arrived(self, plan: PlanView) -> None:
        self.plans.put_nowait(plan)

    def rank_failed(self, epoch: int, death: Death) -> None: ...

    def node_gone(self, position: int) -> None: ...

    def met(self, epoch: int, stage: str, said: Mapping[int, bytes]) -> None: ...

    def ended(self, reason: str | None) -> None:
        self.ends.put_nowait(reason)

    def broken(self, error: BaseException) -> None:
        self.error.set_exception(error)


async def no_store(_epoch: int, _fresh: bool = False) -> tuple[str, int]:
    return "127.0.0.1", 1


@asynccontextmanager
async def decider(settings: EtcdSettings, name: str) -> AsyncIterator[EtcdDecider]:
    made = EtcdDecider(settings, "job", NodeRecord(host=name, pid=1, slots=1), (2, 3), POLICY, 0)
    try:
        yield made
    finally:
        await made.close(None)


def test_a_node_that_gets_a_place_before_it_has_looked_around_begins_as_a_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader that waits for a spare takes it as soon as it is known."""

    async def test() -> None:
        server = await EmbeddedEtcd.start(timeout=LIMIT)
        settings = server.settings
        try:
            async with decider(settings, "a") as a, decider(settings, "b") as b, decider(settings, "c") as c:
                ears = [Listener() for _ in "abc"]
                opened = await asyncio.gather(a.open(ears[0], no_store), b.open(ears[1], no_store))
                for one, view in zip((a, b), opened, strict=True):
                    rank = view.world.position
                    assert rank is not None
                    one.publish(SlotState(0, rank, 1, leto=True, protected=True, shadow="ready", finished=False))
                lost = opened[1].world.position
                assert lost is not None
                a.report(0, Death(lost, lost, 0, 0, FailureClass.NODE, 7, "", 0))
                meet = Coordinator.meet

                async def late(self: Coordinator, make_store: MakeStore, **counts: int) -> PlanRecord:
                    assert (await ears[0].plans.get()).epoch == 1
                    return await meet(self, make_store, **counts)

                monkeypatch.setattr(Coordinator, "meet", late)
                begun = await c.open(ears[2], no_store)
                assert (begun.epoch, begun.world.position) == (0, None)
                plan = await ears[2].plans.get()
                assert (plan.epoch, plan.action, plan.world.position) == (1, "repair", lost)
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(test(), LIMIT))


def test_a_spare_ends_when_all_nodes_with_places_have_left() -> None:
    """Each time that it is one: an agent that was fenced is a spare from then on."""

    async def test() -> None:
        server = await EmbeddedEtcd.start(timeout=LIMIT)
        settings = server.settings
        try:
            async with decider(settings, "c") as spare:
                for _ in range(2):
                    async with decider(settings, "a") as a, decider(settings, "b") as b:
                        await asyncio.gather(a.open(Listener(), no_store), b.open(Listener(), no_store))
                        ears = Listener()
                        assert (await spare.open(ears, no_store)).world.position is None
                    assert await ears.ends.get() == "all its nodes have left it"
                    await spare.close(None)
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(test(), LIMIT))
