"""Failures become plans, over every way in which etcd, a leader or an agent may go away in between."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from leto_elastic.coordinator.client import Answer, Condition, Missing, Operation, Put
from leto_elastic.coordinator.coordinator import Coordinator
from leto_elastic.coordinator.embedded import EmbeddedEtcd
from leto_elastic.coordinator.leader import Leader
from leto_elastic.coordinator.schema import (
    BudgetRecord,
    FailureRecord,
    NodeRecord,
    PlanRecord,
    RunRecord,
    SlotRecord,
    decode,
)
from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.errors import ConfigError, LetoError
from leto_elastic.recovery.ladder import Decision, JobView, Repair
from leto_elastic.recovery.policy import CoordinatorPolicy, Deadlines, FailureClass, Limits, Policy
from tests.process.etcd_server import LIMIT, eventually, pause, run

pytestmark = pytest.mark.process

POLICY = Policy(coordinator=CoordinatorPolicy(lease=2))


def failure(rank: int, step: int = 7) -> FailureRecord:
    return FailureRecord(rank=rank, slot=rank, pid=100 + rank, cause=FailureClass.SIGNAL, step=step, phase="update")


async def no_store(_epoch: int, _fresh: bool = False) -> tuple[str, int]:
    return "127.0.0.1", 1


@asynccontextmanager
async def etcd() -> AsyncIterator[EmbeddedEtcd]:
    server = await EmbeddedEtcd.start(timeout=LIMIT)
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def agent(
    settings: EtcdSettings, node: str = "a", policy: Policy = POLICY, slots: int = 0, offers: int | None = None
) -> AsyncIterator[Coordinator]:
    """A registered agent. With slots: it owns the run, and all its slots are protected and have a shadow."""
    coordinator = await Coordinator.open(settings, "job", node, policy)
    try:
        await coordinator.register(NodeRecord(host="h", pid=1, slots=slots if offers is None else offers))
        if slots:
            assert (await coordinator.meet(no_store)).epoch == 0
            for slot in range(slots):
                record = SlotRecord(rank=slot, pid=100 + slot, leto=True, protected=True, shadow="ready")
                await coordinator.put_slot(slot, record)
        yield coordinator
    finally:
        await coordinator.close()


@asynccontextmanager
async def leader(coordinator: Coordinator, **arguments: Any) -> AsyncIterator[Leader]:
    async def make_store(epoch: int, _fresh: bool = False) -> tuple[str, int]:
        return "127.0.0.1", 1000 + epoch

    made = Leader(coordinator, **{"make_store": make_store, **arguments})
    made.start()
    try:
        yield made
    finally:
        await made.close()


async def written_plans(coordinator: Coordinator) -> list[PlanRecord]:
    snapshot = await coordinator.client.get_prefix(coordinator.keys.plans, timeout=LIMIT)
    return [decode(entry.key, entry.value, PlanRecord) for entry in snapshot.entries]


def test_a_failure_becomes_a_plan() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, slots=4) as a, leader(a), aclosing(a.plans()) as plans:
            assert await a.report_failure(0, failure(2))
            plan = await anext(plans)
            assert (plan.epoch, plan.action, plan.repairs) == (1, "repair", (Repair(2, 2, "promote"),))
            assert (plan.store_host, plan.store_port) == ("127.0.0.1", 1001)
            assert plan.failures == (failure(2),)
            assert plan.step == 7
            assert await a.report_failure(1, failure(2, step=8))
            assert (await anext(plans)).epoch == 2
            budget = await a.client.get(a.keys.budget, timeout=LIMIT)
            assert budget is not None
            assert decode(budget.key, budget.value, BudgetRecord) == BudgetRecord(recoveries=2)

    run(test)


def test_failures_that_come_together_make_one_plan() -> None:
    async def test() -> None:
        release = asyncio.Event()

        async def make_store(epoch: int, _fresh: bool = False) -> tuple[str, int]:
            await release.wait()  # so that collecting lasts until all are reported, however slow the machine is
            return "127.0.0.1", 1

        async with (
            etcd() as server,
            agent(server.settings, slots=4) as a,
            leader(a, make_store=make_store),
            aclosing(a.plans()) as plans,
        ):
            assert await asyncio.gather(*(a.report_failure(0, failure(rank)) for rank in range(4))) == [True] * 4
            release.set()
            plan = await anext(plans)
            assert [f.rank for f in plan.failures] == [0, 1, 2, 3]
            assert [repair.rank for repair in plan.repairs] == [0, 1, 2, 3]

    run(test)


def test_a_report_is_fenced_by_its_epoch_and_may_be_repeated() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, slots=2) as a:
            assert not await a.report_failure(1, failure(0))
            assert await a.report_failure(0, failure(0))
            assert await a.report_failure(0, failure(0))
            async with leader(a), aclosing(a.plans()) as plans:
                assert [f.rank for f in (await anext(plans)).failures] == [0]
                assert not await a.report_failure(0, failure(1))
                assert await a.report_failure(0, failure(0)), "it was accepted, and the plan took care of it"

    run(test)


def test_a_failure_accepted_between_decision_and_plan_is_in_the_plan() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, slots=2) as a:
            views: list[JobView] = []

            def decide(policy: Policy, view: JobView) -> Decision:
                views.append(view)
                if len(views) == 1:  # another agent is faster than the leader's transaction
                    _elsewhere(lambda: _report(server.settings, failure(1)))
                return Decision("repair", tuple(Repair(f.rank, f.slot, "promote") for f in view.failures), "")

            async with leader(a, decide=decide), aclosing(a.plans()) as plans:
                assert await a.report_failure(0, failure(0))
                assert [f.rank for f in (await anext(plans)).failures] == [0, 1]
                assert [[f.rank for f in view.failures] for view in views] == [[0], [0, 1]]
                assert len(await written_plans(a)) == 1

    async def _report(settings: EtcdSettings, record: FailureRecord) -> None:
        async with agent(settings, "b") as b:
            assert await b.report_failure(0, record)

    run(test)


def _elsewhere(make: Callable[[], Any]) -> None:
    """Run in a thread with a loop of its own, as another agent, and wait."""
    thread = threading.Thread(target=lambda: asyncio.run(make()))
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_etcd_is_away_when_a_worker_fails() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, slots=2) as a, leader(a), aclosing(a.plans()) as plans:
            for epoch in range(3):
                upcoming = asyncio.ensure_future(anext(plans))
                os.kill(server.pid, signal.SIGKILL)
                record = SlotRecord(rank=1, pid=epoch, leto=True, protected=True, shadow="none")
                await a.put_slot(1, record)
                assert await a.report_failure(epoch, failure(1, step=epoch))
                plan = await upcoming
                # The state put before the report is the one that was decided on.
                assert (plan.epoch, plan.repairs) == (epoch + 1, (Repair(1, 1, "respawn"),))

    run(test)


def test_a_report_follows_the_slots_that_were_put_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, offers=1) as a:
            await a.meet(no_store)
            order: list[str] = []
            original = a.client.txn

            async def txn(conditions: Sequence[Condition], operations: Sequence[Operation], **rest: Any) -> Answer:
                what = "failure" if conditions else "slots"
                order.append(f"{what} begins")
                answer = await original(conditions, operations, **rest)
                order.append(f"{what} ends")
                return answer

            monkeypatch.setattr(a.client, "txn", txn)
            await a.put_slot(0, SlotRecord(rank=0, pid=1))
            assert await a.report_failure(0, failure(0))
            assert order == ["slots begins", "slots ends", "failure begins", "failure ends"]

    run(test)


def test_a_report_is_given_up_when_it_is_cancelled() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, slots=1) as a:
            pause(server.pid)
            report = asyncio.create_task(a.report_failure(0, failure(0)))
            await asyncio.wait([report], timeout=0.05)
            report.cancel()
            with pytest.raises(asyncio.CancelledError):
                await report
            os.kill(server.pid, signal.SIGCONT)

    run(test)


def test_while_etcd_is_away_putting_does_not_wait_and_flushing_has_a_deadline() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, offers=1) as a:
            await a.meet(no_store)
            pause(server.pid)
            for pid in range(5):
                await a.put_slot(3, SlotRecord(rank=3, pid=pid))
            with pytest.raises(LetoError, match=r"did not take the state of the slots within 0\.05 s"):
                await a.flush(0.05)
            os.kill(server.pid, signal.SIGCONT)
            await a.flush(LIMIT)
            entry = await a.client.get(a.keys.slot(3), timeout=LIMIT)
            assert entry is not None
            assert decode(entry.key, entry.value, SlotRecord).pid == 4

    run(test)


def test_plans_resume_where_they_were() -> None:
    """Each plan once and in order, whether it was read, watched, written while etcd restarted, or compacted."""

    async def test() -> None:
        async with etcd() as server, agent(server.settings, slots=1) as a, leader(a), aclosing(a.plans()) as plans:
            seen = []
            for epoch in range(6):
                if epoch == 2:
                    os.kill(server.pid, signal.SIGKILL)
                assert await a.report_failure(epoch, failure(0, step=epoch))
                await eventually(partial(_reached, a, epoch + 1))
                if epoch == 4:
                    await a.client.compact((await a.client.get_prefix("/leto/", timeout=LIMIT)).revision, timeout=LIMIT)
                    os.kill(server.pid, signal.SIGKILL)
                if epoch % 2:
                    seen += [(await anext(plans)).epoch, (await anext(plans)).epoch]
            assert seen == [1, 2, 3, 4, 5, 6]
            async with aclosing(a.plans(after=4)) as late:
                assert [(await anext(late)).epoch, (await anext(late)).epoch] == [5, 6]

    async def _reached(a: Coordinator, epoch: int) -> bool:
        return len(await written_plans(a)) >= epoch

    run(test)


def test_a_leader_that_dies_while_it_decides_is_replaced() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, "b") as b:
            stuck = asyncio.Event()

            async def never(epoch: int) -> tuple[str, int]:
                stuck.set()
                await asyncio.Event().wait()
                raise AssertionError

            async with (
                agent(server.settings, slots=2) as a,
                leader(a, make_store=never) as first,
            ):
                await first.leading.wait()
                async with leader(b) as second, aclosing(b.plans()) as plans:
                    assert await a.report_failure(0, failure(0))
                    await stuck.wait()
                    assert not second.leading.is_set()
                    await first.close()
                    await a.close()
                    plan = await anext(plans)
                    assert (plan.epoch, plan.failures) == (1, (failure(0),))
                    assert second.leading.is_set()

    run(test)


def test_a_leader_that_was_cut_off_cannot_write() -> None:
    """It has decided, and does not know yet that another one leads, which has not planned yet."""

    async def test() -> None:
        async with etcd() as server, agent(server.settings, slots=2) as a, agent(server.settings, "b") as b:
            stuck, release = {one: asyncio.Event() for one in "ab"}, {one: asyncio.Event() for one in "ab"}

            async def slow(name: str, epoch: int) -> tuple[str, int]:
                stuck[name].set()
                await release[name].wait()
                return name, 1

            async with leader(a, make_store=partial(slow, "a")) as first:
                await first.leading.wait()
                assert await a.report_failure(0, failure(0))
                await stuck["a"].wait()
                async with leader(b, make_store=partial(slow, "b")), aclosing(b.plans()) as plans:
                    await a.client.delete(a.keys.leader, timeout=LIMIT)
                    await stuck["b"].wait()
                    release["a"].set()
                    await eventually(partial(_stepped_down, first))
                    assert await written_plans(a) == []
                    release["b"].set()
                    assert (await anext(plans)).store_host == "b"
                    assert await b.report_failure(1, failure(1))
                    assert (await anext(plans)).store_host == "b"
                assert [plan.epoch for plan in await written_plans(a)] == [1, 2]

    async def _stepped_down(one: Leader) -> bool:
        return not one.leading.is_set()

    run(test)


def test_a_dead_leader_is_deposed_before_its_lease_ends() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, slots=1) as a, agent(server.settings, "b") as b:
            async with leader(a) as first:
                await first.leading.wait()
            async with leader(b) as second, aclosing(b.plans()) as plans:
                await b.depose("b")
                assert not second.leading.is_set()
                await b.depose("a")
                assert await b.report_failure(0, failure(0))
                assert (await anext(plans)).epoch == 1

    run(test)


def test_a_leader_that_does_not_know_yet_that_it_was_replaced_cannot_write() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, slots=1) as a:
            views: list[JobView] = []

            def decide(policy: Policy, view: JobView) -> Decision:
                views.append(view)
                if len(views) == 1:  # between the decision and its transaction
                    _elsewhere(lambda: _usurp(server.settings))
                return Decision("repair", (), "")

            async with leader(a, decide=decide), aclosing(a.plans()) as plans:
                assert await a.report_failure(0, failure(0))
                assert (await anext(plans)).epoch == 1
                assert len(views) == 2, "the plan is that of its second term"

    async def _usurp(settings: EtcdSettings) -> None:
        async with agent(settings, "b") as b:
            await b.client.delete(b.keys.leader, timeout=LIMIT)
            await b.client.put(b.keys.leader, b"b", lease=(await b.lease()).id, timeout=LIMIT)

    run(test)


def test_limits_hold_over_a_change_of_leaders() -> None:
    async def test() -> None:
        policy = Policy(coordinator=CoordinatorPolicy(lease=2), limits=Limits(per_step=2))
        async with (
            etcd() as server,
            agent(server.settings, slots=1, policy=policy) as a,
            aclosing(a.plans()) as plans,
        ):
            for epoch, action in enumerate(["repair", "repair", "fail"]):
                async with agent(server.settings, f"leader {epoch}", policy) as b, leader(b):
                    assert await a.report_failure(epoch, failure(0, step=5))
                    plan = await anext(plans)
                    assert (plan.epoch, plan.action) == (epoch + 1, action)
            assert (plan.store_host, plan.store_port) == ("", 0)
            assert "per_step" in plan.reason

    run(test)


def test_the_budget_of_the_job_runs_out() -> None:
    async def test() -> None:
        policy = Policy(coordinator=CoordinatorPolicy(lease=2), limits=Limits(per_job=1))
        async with (
            etcd() as server,
            agent(server.settings, slots=1, policy=policy) as a,
            leader(a),
            aclosing(a.plans()) as plans,
        ):
            assert await a.report_failure(0, failure(0, step=1))
            assert (await anext(plans)).action == "repair"
            assert await a.report_failure(1, failure(0, step=2))
            assert (await anext(plans)).action == "fail"

    run(test)


def test_restarts_of_a_group_without_leto() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, offers=1) as a, leader(a, max_restarts=1):
            await a.meet(no_store)
            await a.put_slot(0, SlotRecord(rank=0, pid=1))
            async with aclosing(a.plans()) as plans:
                assert await a.report_failure(0, failure(0, step=0))
                plan = await anext(plans)
                assert (plan.action, plan.store_port) == ("restart", 1001)
                assert await a.report_failure(1, failure(0, step=0))
                assert (await anext(plans)).action == "fail"

    run(test)


def test_an_error_of_the_leader_reaches_whoever_waits_for_it() -> None:
    async def test() -> None:
        async def broken(epoch: int) -> tuple[str, int]:
            raise OSError("no ports left")

        async with etcd() as server, agent(server.settings, slots=1) as a, leader(a, make_store=broken) as one:
            assert await a.report_failure(0, failure(0))
            with pytest.raises(OSError, match="no ports left"):
                await one.start()

    run(test)


def test_a_run_has_one_owner_until_it_is_gone() -> None:
    async def test() -> None:
        impatient = Policy(coordinator=CoordinatorPolicy(lease=2), deadlines=Deadlines(etcd=0.3))
        async with etcd() as server:
            async with agent(server.settings, slots=1) as a, leader(a):
                async with aclosing(a.plans()) as plans:
                    assert await a.report_failure(0, failure(0))
                    assert (await anext(plans)).epoch == 1
                async with agent(server.settings, "b", impatient) as b:
                    with pytest.raises(ConfigError, match="run id 'job' is in use by agent a"):
                        await b.meet(no_store)
                    assert len(await written_plans(a)) == 1
                patient = await Coordinator.open(server.settings, "job", "c", POLICY)
                await patient.register(NodeRecord(host="h", pid=2, slots=1))
                waiting = asyncio.create_task(patient.meet(no_store))
                await asyncio.wait([waiting], timeout=0.05)
                assert not waiting.done()
            assert (await waiting).epoch == 0
            assert await written_plans(patient) == []
            async with leader(patient), aclosing(patient.plans()) as plans:
                assert await patient.report_failure(0, failure(0))
                assert (await anext(plans)).action == "fail", "nothing is protected in the new job"
            await patient.finish("failed", timeout=LIMIT)
            entry = await patient.client.get(patient.keys.run, timeout=LIMIT)
            assert entry is not None
            assert decode(entry.key, entry.value, RunRecord).state == "failed"
            await patient.close()

    run(test)


def test_of_agents_that_begin_at_once_one_owns_the_run() -> None:
    async def test() -> None:
        policy = Policy(coordinator=CoordinatorPolicy(lease=2), deadlines=Deadlines(etcd=0.5))
        async with etcd() as server:
            agents = [await Coordinator.open(server.settings, "job", f"n{i}", policy) for i in range(4)]
            for one in agents:
                await one.register(NodeRecord(host="h", pid=1, slots=1))
            ends = await asyncio.gather(*(one.meet(no_store) for one in agents), return_exceptions=True)
            assert sorted(type(end).__name__ for end in ends) == ["ConfigError"] * 3 + ["PlanRecord"]
            owner = agents[[isinstance(end, PlanRecord) for end in ends].index(True)]
            assert (await owner.meet(no_store)).epoch == 0, "idempotent"
            for one in agents:
                await one.close()

    run(test)


def test_a_node_whose_lease_ended_joins_again_and_leads_again() -> None:
    async def test() -> None:
        async with etcd() as server, agent(server.settings, slots=1) as a, leader(a) as one:
            await one.leading.wait()
            lease = await a.lease()
            async with agent(server.settings, "b") as b:
                await b.client.revoke(type(lease)(lease.id, lease.ttl), timeout=LIMIT)
                assert (await a.client.txn([Missing(a.keys.leader)], [Put("/leto/x", b"")], timeout=LIMIT)).done
            async with aclosing(a.plans()) as plans:
                assert await a.report_failure(0, failure(0))
                assert (await anext(plans)).epoch == 1
            entry = await a.client.get(a.keys.node("a"), timeout=LIMIT)
            assert entry is not None
            assert entry.lease == (await a.lease()).id != lease.id

    run(test)


def test_runs_do_not_see_each_other() -> None:
    async def test() -> None:
        async with etcd() as server:
            ids = ["job", "job/x", "job%2Fx", "jo"]
            several = [await Coordinator.open(server.settings, run_id, "a", POLICY) for run_id in ids]
            for one in several:
                await one.register(NodeRecord(host="h", pid=1, slots=1))
                assert (await one.meet(no_store)).epoch == 0
                assert len((await one.client.get_prefix(one.keys.root, timeout=LIMIT)).entries) == 5
            for one in several:
                await one.close()

    run(test)


def test_the_default_run_id_is_refused_on_a_shared_etcd() -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="--rdzv-id"):
            await Coordinator.open(EtcdSettings(endpoints=("127.0.0.1:1",)), "none", "a", POLICY)

    run(test)
