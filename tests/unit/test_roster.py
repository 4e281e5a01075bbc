"""Who is there and who takes part, as an agent reads it from the keys of a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_elastic.coordinator.client import Batch, Snapshot
from leto_elastic.coordinator.roster import Roster
from leto_elastic.coordinator.schema import (
    BudgetRecord,
    FailureRecord,
    Keys,
    NodeRecord,
    PlanRecord,
    RunRecord,
    Seat,
    SlotRecord,
    encode,
)
from leto_elastic.recovery.policy import FailureClass
from tests.unit.test_coordinator_records import Etcd

KEYS = Keys("job")
Puts = list[tuple[str, bytes]]


def node(name: str, slots: int = 2) -> Puts:
    return [(KEYS.node(name), encode(NodeRecord(host=name, pid=1, slots=slots)))]


def plan(epoch: int, nodes: str, action: str = "repair") -> PlanRecord:
    return PlanRecord(
        epoch=epoch,
        action=action,  # type: ignore[arg-type]
        repairs=(),
        store_host="h",
        store_port=1,
        reason="",
        failures=(),
        step=0,
        time=0.0,
        nodes=tuple(Seat(node=name, slots=2) for name in nodes),
    )


def begun(nodes: str, owner: str = "a") -> Puts:
    """What the agent that begins a run writes at once."""
    return [
        (KEYS.run, encode(RunRecord(owner=owner, started=1.0))),
        (KEYS.start, encode(plan(0, nodes, "start"))),
        (KEYS.epoch, b"0"),
        (KEYS.budget, encode(BudgetRecord())),
    ]


def planned(epoch: int, nodes: str) -> Puts:
    return [(KEYS.epoch, b"%d" % epoch), (KEYS.plan(epoch), encode(plan(epoch, nodes)))]


class Watched(Etcd):
    """Etcd, and every change as a watch would have told it."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []

    def write(self, puts: Puts, delete: Sequence[str] = ()) -> None:
        """All in one revision."""
        batch = self.put(*puts)
        events = list(batch.events)
        for key in [key for key in self.entries if key.startswith(tuple(delete))] if delete else []:
            self.revision -= 1
            events += self.delete(key).events
        self.batches.append(Batch(batch.revision, tuple(events)))

    def leave(self, name: str) -> None:
        self.batches.append(self.delete(KEYS.node(name)))


def read(etcd: Etcd, name: str = "a") -> Roster:
    roster = Roster(KEYS, name)
    roster.apply(etcd.snapshot())
    return roster


def taking_part(roster: Roster) -> tuple[bool, bool]:
    """Whether this node does, and whether anybody does."""
    return roster.member, roster.running


def facts(roster: Roster) -> object:
    run = (roster.run, roster.entry, roster.plan, roster.members, roster.member, roster.running)
    return roster.nodes, roster.revisions, run, roster.fresh()


def history() -> list[tuple[Batch, Snapshot]]:
    """Two nodes begin a run, one is lost, a spare takes its place; all go, and two others begin it anew."""
    etcd = Watched()
    steps: list[tuple[Batch, Snapshot]] = []

    def note() -> None:
        steps.append((etcd.batches[-1], etcd.snapshot()))

    for puts in (
        node("b"),
        node("a"),
        begun("ba"),
        [(KEYS.leader, b"b"), (KEYS.secret, b"00")],
        [(KEYS.slot(0), encode(SlotRecord(rank=0, pid=1)))],
        node("c"),
        [
            (
                KEYS.failure(0, 2),
                encode(FailureRecord(rank=2, slot=2, pid=1, cause=FailureClass.NODE, step=3)),
            )
        ],
    ):
        etcd.write(puts)
        note()
    etcd.leave("a")
    note()
    for puts in (planned(1, "bc"), planned(2, "bc"), [(KEYS.meeting(2, "ready", 0), b"")], planned(10, "bc")):
        etcd.write(puts)
        note()
    for name in "bc":
        etcd.leave(name)
        note()
    for name in "ed":
        etcd.write(node(name))
        note()
    etcd.write(begun("ed", "e"), [KEYS.slots, KEYS.failures, KEYS.plans, KEYS.meetings, KEYS.shards])
    note()
    etcd.write(planned(1, "ed"))
    note()
    return steps


HISTORY = history()


@pytest.mark.parametrize("start", range(len(HISTORY)))
def test_watching_from_any_point_shows_what_reading_shows(start: int) -> None:
    watching = Roster(KEYS, "c")
    watching.apply(HISTORY[start][1])
    for batch, snapshot in HISTORY[start + 1 :]:
        watching.apply(batch)
        reading = Roster(KEYS, "c")
        reading.apply(snapshot)
        assert facts(watching) == facts(reading)


def test_several_revisions_may_come_in_one_batch() -> None:
    together, reading = Roster(KEYS, "c"), Roster(KEYS, "c")
    together.apply(Batch(0, tuple(event for batch, _ in HISTORY for event in batch.events)))
    reading.apply(HISTORY[-1][1])
    assert facts(together) == facts(reading)


@settings(deadline=None, max_examples=30)
@given(st.randoms(use_true_random=False))
def test_the_order_of_the_keys_of_one_revision_does_not_matter(random: Random) -> None:
    watching = Roster(KEYS, "c")
    for batch, snapshot in HISTORY:
        events, entries = list(batch.events), list(snapshot.entries)
        random.shuffle(events)
        random.shuffle(entries)
        watching.apply(Batch(batch.revision, tuple(events)))
        reading = Roster(KEYS, "c")
        reading.apply(Snapshot(snapshot.revision, tuple(entries)))
        assert facts(watching) == facts(reading)


def test_the_newest_plan_says_who_takes_part_whichever_is_read_first() -> None:
    etcd = Etcd()
    etcd.put(*begun("ab"), *planned(2, "ac"), *planned(10, "ad"), *node("a"))
    entries = [entry for entry in etcd.snapshot().entries if entry.key in (KEYS.start, KEYS.plan(2), KEYS.plan(10))]
    for order in permutations(entries):
        roster = Roster(KEYS, "a")
        roster.apply(Snapshot(1, order))
        assert roster.members == ("a", "d")


def test_a_snapshot_replaces_all_that_was_known() -> None:
    roster = Roster(KEYS, "c")
    roster.apply(HISTORY[-1][1])
    roster.apply(Snapshot(99, ()))
    assert facts(roster) == facts(Roster(KEYS, "c"))


# ---- what an agent does by it


def test_nobody_is_there() -> None:
    roster = Roster(KEYS, "a")
    assert (roster.run, roster.entry, roster.members, roster.fresh()) == (None, None, (), [])
    assert not roster.running
    assert not roster.member


def test_the_first_to_come_come_first() -> None:
    etcd = Etcd()
    for name in "cab":
        etcd.put(*node(name))
    assert read(etcd).fresh() == ["c", "a", "b"]


def test_a_node_that_only_renews_its_record_keeps_its_turn_and_one_that_comes_again_does_not() -> None:
    etcd = Etcd()
    roster = Roster(KEYS, "a")
    for name in "abca":
        roster.apply(etcd.put(*node(name)))
    assert roster.fresh() == ["a", "b", "c"]
    roster.apply(etcd.delete(KEYS.node("a")))
    assert roster.fresh() == ["b", "c"]
    roster.apply(etcd.put(*node("a")))
    assert roster.fresh() == ["b", "c", "a"]
    assert roster.revisions == {"b": 2, "c": 3, "a": 6}


def test_a_node_without_slots_cannot_begin() -> None:
    etcd = Etcd()
    etcd.put(*node("a", slots=0), *node("b"))
    assert read(etcd).fresh() == ["b"]


def test_members_are_those_of_the_plan_by_position() -> None:
    etcd = Etcd()
    etcd.put(*node("a"), *node("b"), *begun("ba"))
    for name in "ab":
        roster = read(etcd, name)
        assert roster.members == ("b", "a")
        assert roster.member
        assert roster.running
        assert roster.fresh() == [], "who takes part begins no other run"
        assert roster.run == RunRecord(owner="a", started=1.0)
        assert roster.entry == encode(RunRecord(owner="a", started=1.0))


def test_a_spare_is_no_member_until_a_plan_names_it() -> None:
    etcd = Etcd()
    etcd.put(*node("a"), *node("b"), *begun("ab"))
    roster = read(etcd, "c")
    roster.apply(etcd.put(*node("c")))
    assert taking_part(roster) == (False, True)
    assert roster.fresh() == ["c"]
    roster.apply(etcd.delete(KEYS.node("b")))
    assert taking_part(roster) == (False, True)
    roster.apply(etcd.put(*planned(1, "ac")))
    assert taking_part(roster) == (True, True)
    assert roster.members == ("a", "c")
    assert roster.fresh() == []


def test_a_member_whose_place_was_taken_is_none() -> None:
    etcd = Etcd()
    etcd.put(*node("a"), *node("b"), *node("c"), *begun("ab"), *planned(1, "ac"))
    roster = read(etcd, "b")
    assert not roster.member
    assert roster.running
    assert roster.fresh() == ["b"]


def test_a_run_goes_on_as_long_as_one_member_is_there() -> None:
    etcd = Etcd()
    etcd.put(*node("a"), *node("b"), *node("c"), *begun("ab"))
    roster = read(etcd, "c")
    roster.apply(etcd.delete(KEYS.node("a")))
    assert taking_part(roster) == (False, True)
    roster.apply(etcd.delete(KEYS.node("b")))
    assert taking_part(roster) == (False, False), "a spare is no member"
    assert roster.members == ("a", "b"), "as it was left"
    assert roster.fresh() == ["c"]


def test_a_member_that_nobody_is_left_of_takes_part_in_nothing() -> None:
    etcd = Etcd()
    etcd.put(*node("a"), *begun("a"))
    etcd.delete(KEYS.node("a"))
    assert taking_part(read(etcd, "a")) == (False, False)
    etcd.put(*node("b"))
    assert taking_part(read(etcd, "a")) == (False, False)


def test_a_plan_without_a_run_is_none_that_goes_on() -> None:
    etcd = Etcd()
    etcd.put(*node("a"), (KEYS.start, encode(plan(0, "a", "start"))))
    assert taking_part(read(etcd)) == (False, False)


def test_a_new_run_that_deletes_the_plans_of_the_old_one() -> None:
    etcd = Watched()
    etcd.write(node("a") + begun("a"))
    etcd.write(planned(3, "a"))
    watching = read(etcd, "b")
    etcd.leave("a")
    etcd.write(node("b"))
    etcd.write(begun("b", "b"), [KEYS.plans])
    for batch in etcd.batches[-3:]:
        watching.apply(batch)
    assert watching.plan == plan(0, "b", "start"), "not epoch 3 of the old run"
    assert watching.run == RunRecord(owner="b", started=1.0)
    assert watching.member
    assert facts(watching) == facts(read(etcd, "b"))


def test_the_name_of_a_node_may_hold_anything() -> None:
    etcd = Etcd()
    etcd.put(*node("10.0.0.1:a/b c"))
    assert read(etcd).fresh() == ["10.0.0.1:a/b c"]


def test_other_keys_of_the_run_are_nothing_to_it() -> None:
    etcd = Etcd()
    roster = read(etcd)
    before = facts(roster)
    roster.apply(etcd.put((KEYS.secret, b"x"), (KEYS.leader, b"a"), (KEYS.epoch, b"3"), (KEYS.shard(0), b"?")))
    assert facts(roster) == before
