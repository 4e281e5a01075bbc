"""Keys, records, and the leader's picture of them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_elastic.coordinator.client import Batch, Event, KeyValue, Snapshot
from leto_elastic.coordinator.connection import classify_status
from leto_elastic.coordinator.leader import Mirror
from leto_elastic.coordinator.schema import (
    BudgetRecord,
    FailureRecord,
    Keys,
    NodeRecord,
    PlanRecord,
    Record,
    RunRecord,
    Seat,
    ShardRecord,
    SlotRecord,
    decode,
    encode,
)
from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.coordinator.stubs import grpc
from leto_elastic.errors import ConfigError, LetoError
from leto_elastic.recovery.ladder import Cause, Decision, PastRecovery, Repair
from leto_elastic.recovery.policy import FailureClass, Limits, Policy

KEYS = Keys("job")


def failure(rank: int, step: int = 7) -> FailureRecord:
    return FailureRecord(rank=rank, slot=rank, pid=1, cause=FailureClass.EXIT, step=step)


def plan(epoch: int, action: str = "repair", step: int = 7) -> PlanRecord:
    return msgspec.convert(
        {
            "epoch": epoch,
            "action": action,
            "repairs": [{"rank": 0, "slot": 0, "action": "promote"}],
            "store_host": "h",
            "store_port": 1,
            "reason": "",
            "failures": [failure(0, step)],
            "step": step,
            "time": float(epoch),
            "nodes": [Seat(node="a", slots=2, domain="a", place="a")],
            "count": 1,
        },
        PlanRecord,
        from_attributes=True,
    )


RECORDS: list[Record] = [
    RunRecord(owner="a", started=1.5),
    NodeRecord(host="h", pid=1, slots=2),
    SlotRecord(rank=0, pid=1, leto=True, protected=True, shadow="ready", finished=True),
    failure(3),
    plan(4),
    BudgetRecord(recoveries=1, restarts=2),
    ShardRecord(
        rank=1, version=7, generation=2, bytes=9, chunks=1, digest="d", holders=(2, 3), state="complete", lag=1
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_come_back_as_they_were(record: Record) -> None:
    assert decode("k", encode(record), type(record)) == record


def test_a_record_of_another_version_or_of_something_else_is_refused() -> None:
    with pytest.raises(LetoError, match=r"/k has layout version 2, .* knows 1"):
        decode("/k", b'{"v": 2, "owner": "a"}', RunRecord)
    for value in (b"", b"7", b'{"v": 1}', b"\xff", b'{"v": 1, "owner": 3, "started": 0}'):
        with pytest.raises(LetoError, match="/k holds no RunRecord"):
            decode("/k", value, RunRecord)


def test_keys() -> None:
    assert KEYS.run == "/leto/job/run"
    assert KEYS.failure(3, 12) == "/leto/job/failures/00000003/000012"
    assert KEYS.plan(10) > KEYS.plan(9)
    assert KEYS.node("a/b") == "/leto/job/nodes/a%2Fb"


@given(st.text(min_size=1), st.text(min_size=1))
def test_no_run_lies_within_another(one: str, other: str) -> None:
    if one != other:
        assert not Keys(one).root.startswith(Keys(other).root)


# ---- Mirror


class Etcd:
    """Keys as etcd would report them."""

    def __init__(self) -> None:
        self.revision = 0
        self.entries: dict[str, KeyValue] = {}

    def put(self, *puts: tuple[str, bytes]) -> Batch:
        """All in one revision."""
        self.revision += 1
        events = []
        for key, value in puts:
            created = self.entries[key].create_revision if key in self.entries else self.revision
            self.entries[key] = KeyValue(key, value, created, self.revision, 0)
            events.append(Event(key, self.entries[key], self.revision))
        return Batch(self.revision, tuple(events))

    def delete(self, key: str) -> Batch:
        self.revision += 1
        del self.entries[key]
        return Batch(self.revision, (Event(key, None, self.revision),))

    def snapshot(self) -> Snapshot:
        return Snapshot(self.revision, tuple(self.entries[key] for key in sorted(self.entries)))


def planned(epoch: int, action: str = "repair", recoveries: int = 0) -> list[tuple[str, bytes]]:
    record = plan(epoch, action)
    budget = BudgetRecord(recoveries=recoveries)
    return [(KEYS.budget, encode(budget)), (KEYS.epoch, b"%d" % epoch), (KEYS.plan(epoch), encode(record))]


def history() -> list[tuple[Batch, Snapshot]]:
    """A job's life: each change, and a snapshot after it."""
    etcd, steps = Etcd(), []
    slot = SlotRecord(rank=0, pid=1, leto=True, protected=True, shadow="ready")
    for puts in (
        [
            (KEYS.run, encode(RunRecord(owner="a", started=0.0))),
            (KEYS.start, encode(plan(0, "start"))),
            (KEYS.epoch, b"0"),
            (KEYS.budget, encode(BudgetRecord())),
        ],
        [(KEYS.leader, b"a")],
        [(KEYS.node("a"), encode(NodeRecord(host="h", pid=1, slots=2)))],
        [(KEYS.slot(0), encode(slot)), (KEYS.slot(1), encode(msgspec.structs.replace(slot, shadow="none")))],
        [(KEYS.failure(0, 1), encode(failure(1)))],
        [(KEYS.failure(0, 0), encode(failure(0, step=8)))],
        planned(1, recoveries=1),
        [(KEYS.failure(1, 0), encode(failure(0)))],
        planned(2, "restart", recoveries=1),
        planned(3, recoveries=2),
        [(KEYS.failure(3, 1), encode(failure(1)))],
    ):
        steps.append((etcd.put(*puts), etcd.snapshot()))
    steps.append((etcd.delete(KEYS.leader), etcd.snapshot()))
    return steps


def facts(mirror: Mirror) -> object:
    view = mirror.view(Policy(), 1, 9.0) if mirror.failures else None
    return mirror.revision, mirror.epoch, mirror.leader, mirror.failures, mirror.history, view


@pytest.mark.parametrize("start", range(12))
def test_watching_from_any_point_shows_what_reading_shows(start: int) -> None:
    steps = history()
    watching = Mirror(KEYS)
    watching.apply(steps[start][1])
    for batch, snapshot in steps[start + 1 :]:
        watching.apply(batch)
        reading = Mirror(KEYS)
        reading.apply(snapshot)
        assert facts(watching) == facts(reading)


def test_several_revisions_may_come_in_one_batch() -> None:
    steps = history()
    events = tuple(event for batch, _ in steps for event in batch.events)
    together, reading = Mirror(KEYS), Mirror(KEYS)
    together.apply(Batch(steps[-1][0].revision, events))
    reading.apply(steps[-1][1])
    assert facts(together) == facts(reading)


def test_the_view_that_is_decided_on() -> None:
    mirror = Mirror(KEYS)
    for batch, _ in history()[:6]:
        mirror.apply(batch)
    view = mirror.view(Policy(limits=Limits(per_job=5)), 3, 9.0)
    assert [(f.rank, f.step) for f in view.failures] == [(0, 8), (1, 7)]
    assert (view.epoch, view.step_of_failure, view.now) == (0, 8, 9.0)
    assert view.shadows == {0: "ready", 1: "none"}
    assert (view.protected, view.leto_job, view.finished) == (True, True, False)
    assert (view.restarts_left, view.budget, view.history) == (3, 5, ())


def test_a_lost_node_is_waited_for_since_it_was_reported_whoever_leads() -> None:
    etcd = Etcd()
    start = plan(0, "start")
    etcd.put((KEYS.start, encode(start)), (KEYS.epoch, b"0"))
    lost = msgspec.structs.replace(failure(1), cause=FailureClass.NODE, time=100.0)
    etcd.put((KEYS.failure(0, 1), encode(lost)))
    for now in (150.0, 160.0, 99.0):  # the last one's clock is behind
        mirror = Mirror(KEYS)
        mirror.apply(etcd.snapshot())
        assert mirror.view(Policy(), 0, now).waited == max(0.0, now - 100.0)


def test_a_slot_that_nobody_has_heard_of_is_not_protected() -> None:
    mirror = Mirror(KEYS)
    for batch, _ in history()[:6]:
        if not any(event.key == KEYS.slot(0) for event in batch.events):
            mirror.apply(batch)
    assert not mirror.view(Policy(), 0, 0.0).protected


def test_any_slot_that_has_finished_counts_as_finished() -> None:
    mirror = Mirror(KEYS)
    etcd = Etcd()
    mirror.apply(etcd.put((KEYS.epoch, b"0")))
    for slot in range(2):
        mirror.apply(etcd.put((KEYS.slot(slot), encode(SlotRecord(rank=slot, pid=1)))))
    mirror.apply(etcd.put((KEYS.failure(0, 1), encode(failure(1)))))
    assert not mirror.view(Policy(), 0, 0.0).finished
    mirror.apply(etcd.put((KEYS.slot(0), encode(SlotRecord(rank=0, pid=1, finished=True)))))
    assert mirror.view(Policy(), 0, 0.0).finished


def test_our_own_plan_and_the_watch_that_reports_it_later_are_the_same() -> None:
    steps = history()
    mirror = Mirror(KEYS)
    for batch, _ in steps[:6]:
        mirror.apply(batch)
    mirror.planned(plan(1), BudgetRecord(recoveries=1))
    assert (mirror.epoch, mirror.failures) == (1, {})
    mirror.apply(steps[6][0])
    mirror.apply(steps[7][0])
    assert list(mirror.failures) == [0]
    assert mirror.history == [PastRecovery(1, 7, 1.0, 1, (Cause(0, FailureClass.EXIT, 7, "promote"),))]
    assert mirror.view(Policy(limits=Limits(per_job=5)), 0, 0.0).budget == 4


def test_what_a_decision_costs() -> None:
    mirror = Mirror(KEYS)
    repairs = (Repair(0, 0, "promote"),)
    assert mirror.budget_after(Decision("repair", repairs, "")) == BudgetRecord(recoveries=1)
    assert mirror.budget_after(Decision("restart", (), "")) == BudgetRecord(restarts=1)
    assert mirror.budget_after(Decision("fail", (), "")) == BudgetRecord()


# ---- errors of etcd


@pytest.mark.parametrize(
    ("code", "details", "outcome"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", "again"),
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader", "again"),
        (grpc.StatusCode.UNKNOWN, "Stream removed", "again"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests", "again"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", "refused a request"),
        (grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found", "refused a request"),
        (grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token", "login"),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", "login"),
        (grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", "login"),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "etcdserver: authentication failed, invalid user ID or password",
            "wrong user",
        ),
        (grpc.StatusCode.FAILED_PRECONDITION, "etcdserver: authentication is not enabled", "no authentication enabled"),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: user name is empty", "asks for a user"),
    ],
)
def test_what_an_answer_means(code: grpc.StatusCode, details: str, outcome: str) -> None:
    fault = classify_status(code, details, EtcdSettings(endpoints=("e:1",), user="ann", password="secret"))
    if outcome == "again":
        assert fault.fatal is None
        assert not fault.login
    elif outcome == "login":
        assert fault.login
        assert isinstance(fault.fatal, ConfigError)
    else:
        assert not fault.login
        assert outcome in str(fault.fatal)
        assert "e:1" in str(fault.fatal)
