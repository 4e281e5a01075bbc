"""The state machine of a node in a job of several nodes, told event by event: failures here and elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from leto_elastic import wire
from leto_elastic.launch.actions import (
    Action,
    Emit,
    HandOver,
    Publish,
    Report,
    Restart,
    Say,
    Send,
    Settled,
    Spawn,
    Stand,
    Warn,
)
from leto_elastic.launch.job import SPARE, Job
from leto_elastic.launch.world import PlanView
from leto_elastic.state.header import Phase, Position
from tests.unit.node_rig import SLOTS, Node, death, launches, reported, running, seats
from tests.unit.test_launch_job import STORE, FakeHeld, events, of

# ---- a failure here


def test_slots_have_the_ranks_of_the_place_of_their_node() -> None:
    assert [slot.rank for slot in Node(0).job.slots] == [0, 1]
    assert [slot.rank for slot in Node(2).job.slots] == [4, 5]
    assert [slot.rank for slot in Node(None).job.slots] == [SPARE, SPARE]


def test_a_death_here_aborts_the_trainers_of_this_node_and_is_reported_by_its_rank() -> None:
    node = running()
    actions = node.job.exited(1, -9, 1.0)
    assert actions[0] == Send(0, wire.Abort(0))
    assert reported(actions) == [(0, 3, "signal")]
    assert of(Report, actions)[0].death.slot == 1
    assert of(Warn, actions) == [Warn(3)]
    assert events(actions) == ["failure"]


def test_a_plain_script_is_never_restarted_by_one_node_alone() -> None:
    node = Node(leto=False)
    actions = node.job.exited(1, 3, 1.0)
    assert reported(actions) == [(0, 3, "exit")]
    assert of(Restart, actions) == []
    assert of(Restart, node.short(1, "restart", "why")) == [Restart("why")]


def test_it_stands_once_every_trainer_has_parked() -> None:
    node = running()
    node.job.exited(1, -9, 1.0)
    assert node.plan(1, {3: "promote"}, death(3)) == [], "rank 2 still moves"
    assert node.parked(0) == [Stand(1)]
    assert node.parked(0) == [], "said once"


def test_it_stands_at_the_plan_when_they_have_parked_before_it() -> None:
    node = running()
    node.job.failed_elsewhere(0, death(5), 1.0)
    assert node.parked(0, 1) == [], "there is no plan to stand for"
    assert node.plan(1, {5: "promote"}, death(5)) == [Stand(1)]


def test_it_does_not_stand_while_one_of_two_survivors_moves() -> None:
    node = running()
    node.job.failed_elsewhere(0, death(5), 1.0)
    node.plan(1, {5: "promote"}, death(5))
    assert node.parked(1) == []
    assert node.parked(0) == [Stand(1)]


def test_a_trainer_that_dies_instead_of_parking_ends_the_way() -> None:
    node = running()
    node.job.failed_elsewhere(0, death(5), 1.0)
    node.plan(1, {5: "promote"}, death(5))
    node.parked(1)
    assert reported(node.job.exited(0, -9, 2.0)) == [(1, 2, "signal")]
    assert node.plan(2, {5: "promote", 2: "promote"}, death(2)) == [Stand(2)], "rank 3 has parked for good"


def test_a_node_with_nobody_left_stands_at_once() -> None:
    node = running()
    for key in (0, 1):
        node.job.exited(key, -9, 1.0)
    assert node.plan(1, {2: "promote", 3: "promote"}, death(2), death(3)) == [Stand(1)]


def test_it_is_ready_when_every_replacement_is_and_its_state_is_restored() -> None:
    node = running()
    node.job.exited(1, -9, 1.0)
    node.plan(1, {3: "promote"}, death(3))
    node.parked(0)
    assert node.restored(1) == [Say(1, "ready")]
    assert node.restored(1) == [], "said once"


def test_it_is_not_ready_before_the_last_replacement_is() -> None:
    node = running(shadows=False)
    for key in (0, 1):
        node.job.exited(key, -9, 1.0)
    actions = node.plan(1, {2: "respawn", 3: "respawn"}, death(2), death(3))
    assert actions == [Spawn(0, "respawn"), Spawn(1, "respawn"), Stand(1)], "they start while the nodes meet"
    first, second = node.standby(0, "respawn"), node.standby(1, "respawn", ready=False)
    assert node.restored(1) == []
    assert node.job.slots[0].standby is node.job.members[first], "not promoted yet"
    node.job.rehearsed(second)
    assert of(Say, node.job.ready(second, 2.0)) == [Say(1, "ready")]


def test_a_replacement_that_is_ready_first_does_not_make_the_node_ready() -> None:
    node = running(shadows=False)
    node.job.exited(1, -9, 1.0)
    node.plan(1, {3: "respawn"}, death(3))
    node.standby(1, "respawn", ready=False)
    assert of(Say, node.job.ready(2, 2.0)) == []
    node.parked(0)
    assert node.restored(1) == [Say(1, "ready")]


def test_they_go_together_when_all_nodes_are_ready_and_not_before() -> None:
    node = running()
    node.job.exited(1, -9, 1.0)
    before = node.plan(1, {3: "promote"}, death(3), generation=1) + node.parked(0) + node.restored(1)
    assert launches(before) == []
    assert node.job.all_ready(1, 2.5) == [
        HandOver(3, wire.Promote(1, 0, STORE, 1)),
        Send(0, wire.Plan(1, STORE, 1)),
        Publish(0),
        Publish(1),
    ]
    assert node.job.all_ready(1, 2.6) == [], "only once"


def test_the_recovery_is_told_with_what_happened_on_all_nodes() -> None:
    node = running()
    node.job.failed_elsewhere(0, death(5), 1.0)
    node.job.exited(1, -9, 1.5)
    node.plan(1, {3: "promote", 5: "respawn"}, death(3), death(5))
    node.parked(0)
    node.restored(1)
    node.job.all_ready(1, 2.0)
    assert of(Settled, node.commit_all(1, 0)) == [], "the other rank of this node has not committed"
    settled = node.commit_all(1, 3)
    assert of(Settled, settled) == [Settled(1)], "its own ranks are all that a node waits for"
    (recovery,) = of(Emit, settled)
    assert recovery.fields["ranks"] == [3, 5]
    assert recovery.fields["actions"] == {"3": "promote", "5": "respawn"}
    assert recovery.fields["lost_steps"] == 0
    assert of(Spawn, settled) == [Spawn(1, "shadow")]


def test_steps_are_lost_when_everyone_goes_back() -> None:
    node = running()
    node.held[0].header.position = Position(9, Phase.UPDATE)
    node.job.node_gone(2, 1.0)
    node.plan(1, {4: "replace", 5: "replace"}, death(4), nodes=seats(c="d"), generation=1)
    node.parked(0, 1)
    node.held[0].header.position = Position(7, Phase.COMPUTE)
    node.restored(1, version=7)
    node.job.all_ready(1, 2.0)
    (recovery,) = of(Emit, node.commit_all(1, 0, 1, step=8))
    assert (recovery.fields["cause"], recovery.fields["lost_steps"]) == ("node", 2)


# ---- a failure elsewhere


def test_a_failure_elsewhere_aborts_once() -> None:
    node = running()
    assert node.job.failed_elsewhere(0, death(5), 1.0) == [Send(0, wire.Abort(0)), Send(1, wire.Abort(0))]
    assert node.job.failed_elsewhere(0, death(5), 1.0) == []
    assert node.job.failed_elsewhere(0, death(4), 1.0) == []
    assert of(Send, node.job.exited(1, -9, 1.0)) == []


def test_what_is_told_of_a_failure_elsewhere_without_effect() -> None:
    node = running()
    assert node.job.failed_elsewhere(0, death(2), 1.0) == [], "our own, which we know better"
    assert node.job.failed_elsewhere(1, death(5), 1.0) == [], "an epoch that is not there yet"
    assert Node(None).job.failed_elsewhere(0, death(5), 1.0) == [], "a spare"
    node.job.finish(0)
    assert node.job.failed_elsewhere(0, death(5), 1.0) == [], "all have committed the last step"


def test_a_failure_elsewhere_before_anybody_here_has_said_hello() -> None:
    node = Node(leto=False)
    assert node.job.failed_elsewhere(0, death(5), 1.0) == []
    for key in (0, 1):
        node.job.greeted(key)
    assert of(Settled, node.protect()) == [Settled(0)], "there is no epoch that could have been aborted"


def test_the_stall_begins_with_the_news_and_not_with_the_plan() -> None:
    node = running()
    node.job.failed_elsewhere(0, death(5), 1.0)
    node.plan(1, {5: "promote"}, death(5))
    node.parked(0, 1)
    node.restored(1)
    node.job.all_ready(1, 2.5)
    (recovery,) = of(Emit, node.commit_all(1, 0, 1))
    assert recovery.fields["stall_ms"] == 2000.0
    assert recovery.fields["phases_ms"]["plan"] == 1500.0


def test_news_of_an_epoch_that_is_over_is_without_effect() -> None:
    node = running()
    node.job.failed_elsewhere(0, death(5), 1.0)
    node.plan(1, {5: "promote"}, death(5))
    node.parked(0, 1)
    node.restored(1)
    node.job.all_ready(1, 2.0)
    assert node.job.failed_elsewhere(0, death(5), 2.0) == []
    assert of(Settled, node.commit_all(1, 0, 1)) == [Settled(1)]


def test_a_plan_that_overtakes_the_news_of_its_failure_aborts_first() -> None:
    node = running()
    assert node.plan(1, {5: "promote"}, death(5)) == [Send(0, wire.Abort(0)), Send(1, wire.Abort(0))]
    assert node.job.failed_elsewhere(0, death(5), 2.0) == []
    assert node.parked(0, 1) == [Stand(1)]
    node.restored(1)
    assert launches(node.job.all_ready(1, 2.0)) == [Send(0, wire.Plan(1, STORE)), Send(1, wire.Plan(1, STORE))]
    (recovery,) = of(Emit, node.commit_all(1, 0, 1))
    assert recovery.fields["ranks"] == [5]


# ---- a node is lost


def test_a_lost_node_is_reported_by_all_its_ranks() -> None:
    node = running()
    actions = node.job.node_gone(2, 1.0)
    assert of(Send, actions) == [Send(0, wire.Abort(0)), Send(1, wire.Abort(0))]
    assert actions[:2] == of(Send, actions), "first"
    assert reported(actions) == [(0, 4, "node"), (0, 5, "node")]
    assert {report.death.step for report in of(Report, actions)} == {4}
    again = node.job.node_gone(2, 1.1)
    assert of(Send, again) == []
    assert reported(again) == [(0, 4, "node"), (0, 5, "node")]


def test_a_plan_that_was_made_before_the_loss_is_not_gone_into() -> None:
    node = running()
    node.job.exited(1, -9, 1.0)
    node.job.node_gone(0, 1.1)
    node.parked(0)
    actions = node.plan(1, {3: "promote"}, death(3))
    assert reported(actions) == [(1, 0, "node"), (1, 1, "node")]
    assert of(Stand, actions) == []
    assert node.restored(1) == [], "whatever the others do"
    assert node.job.all_ready(1, 2.0) == []
    actions = node.plan(2, {0: "replace", 1: "replace"}, death(0), nodes=seats(a="d"), generation=2)
    assert actions == [Stand(2)]
    assert node.restored(2, 3) == [Say(2, "ready")]
    assert [type(action) for action in launches(node.job.all_ready(2, 2.0))] == [HandOver, Send]


def test_a_loss_that_the_plan_covers_is_not_reported_again() -> None:
    node = running()
    node.job.node_gone(2, 1.0)
    node.parked(0, 1)
    plan = node.plan(1, {4: "replace", 5: "replace"}, death(4), death(5), nodes=seats(c="d"), generation=1)
    assert plan == [Stand(1)]
    assert reported(node.job.node_gone(0, 1.5)) == [(1, 0, "node"), (1, 1, "node")], "only the one that is lost now"


def test_the_node_that_took_a_place_may_be_lost_too() -> None:
    node = running()
    node.job.node_gone(2, 1.0)
    node.parked(0, 1)
    node.plan(1, {4: "replace", 5: "replace"}, death(4), nodes=seats(c="d"))
    assert reported(node.job.node_gone(2, 2.0)) == [(1, 4, "node"), (1, 5, "node")]
    assert node.plan(2, {4: "replace", 5: "replace"}, death(4), nodes=seats(c="e")) == [Stand(2)]


def test_a_lost_node_is_nothing_to_a_spare_or_when_all_is_over() -> None:
    assert Node(None).job.node_gone(2, 1.0) == []
    node = running()
    node.job.finish(0)
    assert node.job.node_gone(2, 1.0) == []


# ---- a second failure on the way

STAGES = ("planned", "standing", "restored", "readied", "launched")


def on_the_way(stage: str) -> Node:
    """Rank 3 is dead and its process is a respawn (key 2), rank 2 lives (key 0); so far has epoch 1 come."""
    node = running(shadows=False)
    node.job.exited(1, -9, 1.0)
    node.plan(1, {3: "respawn"}, death(3))
    node.standby(1, "respawn", ready=False)
    reached = STAGES.index(stage)
    if reached >= 1:
        assert node.parked(0) == [Stand(1)]
    if reached >= 2:
        assert node.restored(1) == []
    if reached >= 3:
        node.job.rehearsed(2)
        assert of(Say, node.job.ready(2, 2.0)) == [Say(1, "ready")]
    if reached >= 4:
        assert len(launches(node.job.all_ready(1, 2.0))) == 2
    return node


def survivor(node: Node) -> list[Action]:
    return node.job.exited(0, -9, 2.0)


def replacement(node: Node) -> list[Action]:
    return node.job.exited(2, -9, 2.0)


def elsewhere(node: Node) -> list[Action]:
    return node.job.failed_elsewhere(1, death(5), 2.0)


def whole_node(node: Node) -> list[Action]:
    return node.job.node_gone(2, 2.0)


FAILURES: dict[Callable[[Node], list[Action]], tuple[list[int], dict[int, str], dict[str, str]]] = {
    survivor: ([2], {2: "respawn"}, {}),
    replacement: ([3], {3: "respawn"}, {}),
    elsewhere: ([], {5: "promote"}, {}),
    whole_node: ([4, 5], {4: "replace", 5: "replace"}, {"c": "d"}),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fails", FAILURES, ids=lambda fails: fails.__name__)
def test_a_second_failure_begins_the_way_again(stage: str, fails: Callable[[Node], list[Action]]) -> None:
    node = on_the_way(stage)
    ranks, repairs, moved = FAILURES[fails]
    actions = fails(node)
    assert [report.death.rank for report in of(Report, actions)] == ranks
    assert {report.epoch for report in of(Report, actions)} <= {1}
    alive = {key for key, member in node.job.members.items() if member.kind == "trainer"}
    aborts = {send.key for send in of(Send, actions)}
    assert aborts == (alive if stage == "launched" else set()), "who has not been sent into it need not leave it"

    stale = node.parked(0) if stage == "planned" and fails is not survivor else []
    stale += node.restored(1) + node.job.all_ready(1, 2.1)
    assert stale == [], "the way into epoch 1 has ended"

    actions = node.plan(2, repairs, *(death(rank) for rank in repairs), nodes=seats(**moved))
    actions += [action for key in alive & set(node.job.members) for action in node.parked(key)]
    assert of(Stand, actions) == [Stand(2)]
    assert node.restored(1) + node.job.all_ready(1, 2.2) == [], "what is told of an old epoch changes nothing"
    said = node.restored(2)
    for slot in (0, 1):
        standby = node.job.slots[slot].standby
        if node.job.slots[slot].awaiting and (standby is None or not standby.ready):
            assert of(Say, said) == []
            key = node.standby(slot, "respawn", ready=False) if standby is None else standby.key
            node.job.rehearsed(key)
            said = node.job.ready(key, 2.3)
    assert of(Say, said) == [Say(2, "ready")]
    went = launches(node.job.all_ready(2, 2.4))
    assert len(went) == 2, "both ranks of this node"
    assert {action.message.epoch for action in went if isinstance(action, (HandOver, Send))} == {2}  # type: ignore[union-attr]
    keys = [slot.trainer.key for slot in node.job.slots if slot.trainer is not None]
    settled = node.commit_all(2, *keys)
    assert of(Settled, settled) == [Settled(2)]
    (recovery,) = of(Emit, settled)
    assert recovery.fields["ranks"] == sorted({3, *repairs}), "one stall, whose every failure is told"


def test_a_survivor_that_was_sent_into_an_epoch_must_park_again() -> None:
    node = on_the_way("launched")
    node.job.failed_elsewhere(1, death(5), 2.0)
    assert of(Stand, node.plan(2, {5: "promote"}, death(5))) == []
    assert of(Stand, node.parked(2)) == [], "and so must who was promoted"
    assert of(Stand, node.parked(0)) == [Stand(2)]


@pytest.mark.parametrize("stage", STAGES[:4])
def test_a_survivor_that_was_not_sent_into_an_epoch_is_parked_still(stage: str) -> None:
    node = on_the_way(stage)
    node.parked(0)
    node.job.failed_elsewhere(1, death(5), 2.0)
    assert node.plan(2, {5: "promote"}, death(5))[-1:] == [Stand(2)]


def test_a_plan_that_misses_a_death_here_is_not_gone_into() -> None:
    node = on_the_way("readied")
    node.job.exited(2, -9, 2.0)
    actions = node.plan(2, {5: "promote"}, death(5))
    assert reported(actions) == [(2, 3, "signal")]
    assert of(Stand, actions) == []
    assert of(Stand, node.plan(3, {3: "respawn"}, death(3))) == [Stand(3)]


def test_the_recovery_tells_also_what_a_plan_repaired_that_was_not_gone_into() -> None:
    node = running()
    node.job.failed_elsewhere(0, death(5), 1.0)
    node.job.exited(1, -9, 1.0)
    node.plan(1, {5: "respawn"}, death(5))
    node.parked(0)
    node.plan(2, {3: "promote"}, death(3))
    node.restored(2)
    node.job.all_ready(2, 2.0)
    (recovery,) = of(Emit, node.commit_all(2, 0, 3))
    assert recovery.fields["ranks"] == [3, 5]
    assert recovery.fields["actions"] == {"3": "promote", "5": "respawn"}


def test_without_an_epoch_to_build_restored_and_ready_are_nothing() -> None:
    node = running()
    assert node.restored(0) == []
    assert node.job.all_ready(0, 1.0) == []
    assert node.parked(0, 1) == []


# ---- one node whose memory is protected


def test_one_node_goes_by_stages_too_when_its_memory_is_protected() -> None:
    job = Job([FakeHeld(), FakeHeld()], shadows=True, restarts_left=0, staged=True)
    node = Node(shadows=False)
    node.job, node.position = job, 0
    for index in range(SLOTS):
        job.started(index, index, "trainer", 100 + index)
        job.greeted(index)
    node.protect()
    key = node.standby(1)
    job.exited(1, -9, 1.0)
    assert job.plan(PlanView(1, "repair", {1: "promote"}, STORE, ""), 2.0) == []
    assert node.parked(0) == [Stand(1)]
    assert node.restored(1) == [Say(1, "ready")]
    assert launches(job.all_ready(1, 2.0)) == [HandOver(key, wire.Promote(1, 0, STORE)), Send(0, wire.Plan(1, STORE))]
