"""The state machine of a node in a job of several nodes: spares, lost and damaged memory, the end."""

from __future__ import annotations

from leto_elastic import wire
from leto_elastic.launch.actions import (
    Emit,
    End,
    HandOver,
    Hurry,
    Kill,
    Publish,
    Recall,
    Report,
    Restart,
    Say,
    Send,
    Spawn,
    Stand,
    Welcome,
)
from leto_elastic.launch.slots import Blob
from leto_elastic.recovery.policy import FailureClass
from tests.unit.node_rig import SLOTS, Node, death, launches, reported, running, seats
from tests.unit.test_launch_job import STORE, of

# ---- a spare


def spare(*, started: bool) -> Node:
    node = Node(None)
    assert node.job.shadows_wanted() == [Spawn(0, "shadow"), Spawn(1, "shadow")]
    assert node.job.shadows_wanted() == [], "they are on their way"
    for slot in range(SLOTS if started else 0):
        node.standby(slot, ready=False)  # waits for a rank, in leto.init()
    return node


def test_a_spare_waits_until_a_plan_has_a_place_for_it() -> None:
    node = spare(started=True)
    assert node.short(1, "repair") == []
    assert node.job.spare
    assert node.job.epoch == 0
    assert node.short(2, "restart", "why") == [Restart("why")], "it goes along with the others"


def test_a_spare_starts_again_what_dies_while_it_waits() -> None:
    node = spare(started=True)
    assert of(Spawn, node.job.exited(2, -9, 1.0)) == [Spawn(0, "shadow")]


def placed(*, started: bool = True, shadows: bool = True) -> Node:
    node = spare(started=started) if shadows else Node(None, shadows=False)
    actions = node.plan(
        4, {2: "replace", 3: "replace"}, death(2, FailureClass.NODE), nodes=seats(b="d"), place=1, generation=4
    )
    assert actions == [Recall(0), Recall(1), Stand(4)]
    node.position = 1
    return node


def test_a_spare_that_is_placed_has_the_ranks_of_the_place() -> None:
    node = placed()
    assert not node.job.spare
    assert [slot.rank for slot in node.job.slots] == [2, 3]
    assert all(slot.lost for slot in node.job.slots)
    assert node.job.protected, "elsewhere"


def test_a_process_that_waits_for_a_rank_is_welcomed_with_the_record() -> None:
    node = placed()
    assert node.job.recalled(0, Blob(30, 1)) == [Hurry(2), Welcome(2)]
    assert node.job.slots[0].record == Blob(30, 1)


def test_a_process_that_has_not_said_hello_yet_is_welcomed_when_it_does() -> None:
    node = placed(started=False)
    assert of(Hurry, node.job.started(2, 0, "shadow", 102)) == [Hurry(2)]
    assert node.job.recalled(0, Blob(30, 1)) == [Hurry(2)]


def test_a_process_is_started_where_none_waits() -> None:
    node = placed(shadows=False)
    assert node.job.recalled(0, Blob(30, 1)) == [Spawn(0, "respawn")]
    node = placed(started=False)
    assert node.job.recalled(0, Blob(30, 1)) == [], "one is on its way"


def test_a_placed_node_takes_part_before_a_process_of_it_has_said_hello() -> None:
    node = placed(started=False)
    node.job.failed_elsewhere(4, death(0), 2.5)
    assert node.restored(4, 7, {0: Blob(40, 9, 3), 1: Blob(41, 8, 2)}) == []
    for slot in range(SLOTS):
        assert of(Say, node.job.ready(node.standby(slot, ready=False), 3.0)) == [], "the way into epoch 4 has ended"


def test_a_placed_node_gets_its_memory_back_and_goes_with_the_others() -> None:
    node = placed()
    node.job.recalled(0, Blob(30, 1))
    node.job.recalled(1, Blob(31, 1))
    assert node.job.rehearsed(2) == [], "there is nothing to attach yet"
    assert node.restored(4, 7, {0: Blob(40, 9, 3), 1: Blob(41, 8, 2)}) == [
        Send(2, wire.Attach(3, 9, ["header", "weights"], [4096, 100]), (40, 50, 51))
    ], "the other one has not rehearsed yet"
    assert [slot.lost for slot in node.job.slots] == [False, False]
    assert of(Say, node.job.ready(2, 3.0)) == []
    assert node.job.rehearsed(3) == [Send(3, wire.Attach(2, 8, ["header", "weights"], [4096, 100]), (41, 50, 51))]
    assert of(Say, node.job.ready(3, 3.0)) == [Say(4, "ready")]
    assert launches(node.job.all_ready(4, 3.5)) == [
        HandOver(2, wire.Promote(4, 3, STORE, 4)),
        HandOver(3, wire.Promote(4, 2, STORE, 4)),
    ]
    (recovery,) = of(Emit, node.commit_all(4, 2, 3))
    assert recovery.fields["actions"] == {"2": "replace", "3": "replace"}
    assert recovery.fields["cause"] == "node"
    aborts = [Send(2, wire.Abort(4)), Send(3, wire.Abort(4))]
    assert node.job.failed_elsewhere(4, death(0), 4.0) == aborts, "it is one of them now"


def test_a_placed_node_that_loses_a_process_reports_a_lost_state_and_starts_another() -> None:
    node = placed()
    node.job.recalled(0, Blob(30, 1))
    assert reported(node.job.exited(2, -9, 2.0)) == [(4, 2, "state")]
    assert reported(node.job.exited(3, -9, 2.0)) == [(4, 3, "state")]
    actions = node.plan(5, {2: "replace", 3: "replace"}, death(2), death(3), nodes=seats(b="d"))
    assert actions == [Spawn(0, "respawn"), Recall(1), Stand(5)], "the record of slot 1 has not come"


# ---- memory


def restoring() -> Node:
    """Rank 3 is dead, and this node has been told to bring its state to a version."""
    node = running()
    node.job.exited(1, -9, 1.0)
    node.plan(1, {3: "promote"}, death(3))
    assert node.parked(0) == [Stand(1)]
    return node


def test_a_damaged_trainer_is_killed_and_its_end_is_a_lost_state() -> None:
    node = restoring()
    assert node.job.damaged([2]) == [Kill(0)]
    assert reported(node.job.exited(0, -9, 2.0)) == [(1, 2, "state")]
    actions = node.plan(2, {2: "replace"}, death(2, FailureClass.STATE), generation=2)
    assert actions == [Stand(2)]
    assert node.restored(2, 4, {0: Blob(40, 9, 1)}) == [
        Send(2, wire.Attach(1, 9, ["header", "weights"], [4096, 100]), (40, 50, 51)),
        Say(2, "ready"),
    ]
    assert [action.key for action in of(HandOver, node.job.all_ready(2, 3.0))] == [2, 3]


def test_a_damaged_slot_that_waits_for_a_trainer_is_reported() -> None:
    node = restoring()
    assert reported(node.job.damaged([3])) == [(1, 3, "state")]
    assert node.restored(1) == [], "its epoch is over"
    assert node.job.all_ready(1, 2.0) == []
    assert node.plan(2, {3: "replace"}, death(3, FailureClass.STATE)) == [Stand(2)]
    attach, say = node.restored(2, 4, {1: Blob(41, 9, 1)})
    assert isinstance(attach, Send)
    assert attach.fds == (41, 50, 51)
    assert say == Say(2, "ready")


def test_a_standby_that_dies_after_its_slot_was_reported_is_not_another_failure() -> None:
    node = restoring()
    node.job.damaged([3])
    actions = node.job.exited(3, -9, 2.0)
    assert of(Report, actions) == []
    assert node.plan(2, {3: "replace"}, death(3, FailureClass.STATE)) == [Spawn(1, "respawn"), Stand(2)]


def test_both_ranks_damaged() -> None:
    node = restoring()
    actions = node.job.damaged([2, 3])
    assert of(Kill, actions) == [Kill(0)]
    assert reported(actions) == [(1, 3, "state")]
    assert node.job.damaged([0, 4]) == [], "ranks of other nodes"


def test_a_damage_that_no_plan_covers_yet_is_reported_in_the_next_epoch() -> None:
    node = restoring()
    node.job.damaged([3])
    actions = node.plan(2, {5: "promote"}, death(5))
    assert reported(actions) == [(2, 3, "state")]
    assert of(Stand, actions) == []


def test_the_pid_of_a_replacement_is_told_and_a_restored_slot_is_sound() -> None:
    node = restoring()
    node.job.damaged([3])
    node.plan(2, {3: "replace"}, death(3))
    node.restored(2, 4, {1: Blob(41, 9, 1)})
    node.job.all_ready(2, 3.0)
    (recovery,) = of(Emit, node.commit_all(2, 0, 3))
    assert recovery.fields["pids"] == {"3": 103}
    assert reported(node.job.exited(3, -9, 4.0)) == [(2, 3, "signal")], "not a lost state any more"


# ---- the end


def test_a_node_that_has_finished_objects_to_another_epoch() -> None:
    node = running()
    node.job.finish(0)
    actions = node.plan(1, {5: "promote"}, death(5))
    assert of(Publish, actions) == [Publish(0), Publish(1)]
    assert reported(actions) == [(1, 2, "exit")]
    assert of(Report, actions)[0].death.phase == "done"
    assert actions.index(Publish(0)) < actions.index(of(Report, actions)[0]), "the leader sees it before it decides"
    assert of(Stand, actions) == []
    assert node.job.epoch == 1


def test_a_plan_to_finish_releases_those_that_wait() -> None:
    node = running()
    node.job.failed_elsewhere(0, death(5), 1.0)
    node.parked(0, 1)
    assert node.short(1, "finish") == [
        Send(0, wire.Abort(1)),
        Send(1, wire.Abort(1)),
        Send(0, wire.Release()),
        Send(1, wire.Release()),
    ]
    for key in (0, 1):
        node.job.finish(key)
    assert node.job.exited(0, 0, 2.0) == []
    assert node.job.exited(1, 0, 2.0) == [End(None)]


def test_a_plan_to_finish_replaces_alone_who_died() -> None:
    node = running()
    node.job.exited(1, -9, 1.0)
    actions = node.short(1, "finish")
    assert of(Send, actions) == [Send(0, wire.Abort(1)), Send(0, wire.Release())]
    (hand_over,) = of(HandOver, actions)
    assert (hand_over.key, hand_over.message.store.port) == (3, 0)


def test_a_plan_to_finish_releases_nobody_who_has_finished() -> None:
    node = running()
    node.job.finish(0)
    node.plan(1, {5: "promote"}, death(5))
    assert of(Send, node.short(2, "finish")) == [
        Send(0, wire.Abort(2)),
        Send(1, wire.Abort(2)),
        Send(1, wire.Release()),
    ]


def test_a_place_whose_memory_is_lost_has_nothing_to_finish() -> None:
    assert placed().short(5, "finish") == [End(None)]


def test_a_plan_to_fail_ends_every_node() -> None:
    assert running().short(1, "fail", "why") == [End("why")]
    assert Node(None).short(1, "fail", "why") == [End("why")]
