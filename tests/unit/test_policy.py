"""Decisions: pure, so each one is a table line."""

from __future__ import annotations

import msgspec
import pytest

from leto_elastic.recovery.ladder import (
    Decision,
    Failure,
    JobView,
    NodeView,
    PastRecovery,
    Repair,
    ShadowState,
    Spare,
    decide,
)
from leto_elastic.recovery.policy import (
    Action,
    CoordinatorPolicy,
    Deadlines,
    FailureClass,
    HangPolicy,
    Limits,
    LocalProtection,
    Policy,
    PolicyError,
    Protection,
    Window,
)


def failed(*ranks: int, cause: FailureClass = FailureClass.SIGNAL, step: int = 7) -> tuple[Failure, ...]:
    return tuple(Failure(rank, rank, cause, step) for rank in ranks)


VIEW = JobView(
    epoch=0,
    step_of_failure=7,
    failures=failed(2),
    shadows=dict.fromkeys(range(4), "ready"),
    protected=True,
    leto_job=True,
    finished=False,
    history=(),
    now=100.0,
    restarts_left=0,
    budget=1000,
)


def view(**changes: object) -> JobView:
    return msgspec.structs.replace(VIEW, **changes)


def test_a_ready_shadow_is_promoted() -> None:
    assert decide(Policy(), VIEW) == Decision("repair", (Repair(2, 2, "promote"),), "rank 2 failed (signal)")


@pytest.mark.parametrize("shadow", ["none", "starting", "unfit"])
def test_without_a_ready_shadow_the_next_rung_is_taken(shadow: ShadowState) -> None:
    assert decide(Policy(), view(shadows={2: shadow})).repairs == (Repair(2, 2, "respawn"),)


def test_a_slot_without_an_entry_has_no_shadow() -> None:
    assert decide(Policy(), view(shadows={})).repairs == (Repair(2, 2, "respawn"),)


def test_several_failures_are_repaired_together_each_in_its_own_way() -> None:
    decision = decide(Policy(), view(failures=failed(3, 0, 1), shadows={0: "ready", 3: "ready"}))
    assert decision.repairs == (Repair(0, 0, "promote"), Repair(1, 1, "respawn"), Repair(3, 3, "promote"))


def test_the_ladder_is_that_of_the_failures_class() -> None:
    classes = {
        **Policy().classes,
        FailureClass.EXCEPTION: (Action.FAIL,),
        FailureClass.EXIT: (Action.PROMOTE, Action.FAIL),
    }
    policy = Policy(classes=classes)
    assert decide(policy, VIEW).action == "repair"
    assert decide(policy, view(failures=failed(2, cause=FailureClass.EXCEPTION))).action == "fail"
    assert decide(policy, view(failures=failed(2, cause=FailureClass.EXIT))).action == "repair"
    without = decide(policy, view(failures=failed(2, cause=FailureClass.EXIT), shadows={}))
    assert without.action == "fail"
    assert "classes.exit is [promote, fail] and the shadow of slot 2 is: none" in without.reason


def test_one_failure_that_may_not_be_repaired_ends_the_job_for_all() -> None:
    policy = Policy(classes={**Policy().classes, FailureClass.EXIT: (Action.FAIL,)})
    both = failed(1) + failed(2, cause=FailureClass.EXIT)
    assert decide(policy, view(failures=both)) == Decision("fail", (), decide(policy, view(failures=both)).reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protected": False}, "not every rank has committed its first step yet"),
        ({"budget": 0}, "no recoveries left"),
        ({"history": tuple(PastRecovery(e, 7, 0.0) for e in (1, 2, 3))}, "step 7 was recovered 3 times already"),
        (
            {"history": tuple(PastRecovery(e, e, 99.0) for e in range(60))},
            "61 failures within 60 s (limits.per_window allows 60)",
        ),
    ],
)
def test_limits_end_the_job_and_say_which(changes: dict[str, object], reason: str) -> None:
    decision = decide(Policy(), view(**changes))
    assert (decision.action, decision.repairs) == ("fail", ())
    assert reason in decision.reason


def test_just_inside_every_limit_is_repaired() -> None:
    history = tuple(PastRecovery(e, 7 if e < 2 else e + 100, 99.0) for e in range(59))
    assert decide(Policy(), view(history=history, budget=1)).action == "repair"


def test_the_window_counts_failures_not_plans_and_forgets() -> None:
    policy = Policy(limits=Limits(per_window=Window(failures=4, seconds=10.0)))
    recent = (PastRecovery(1, 5, 95.0, failures=3),)
    assert decide(policy, view(history=recent)).action == "repair"
    assert decide(policy, view(history=recent, failures=failed(1, 2))).action == "fail"
    assert decide(policy, view(history=recent, failures=failed(1, 2), now=105.0)).action == "repair"


def test_a_job_that_never_called_init_is_restarted_as_a_whole() -> None:
    plain = view(leto_job=False, protected=False, restarts_left=2)
    assert decide(Policy(), plain).action == "restart"
    over = decide(Policy(), msgspec.structs.replace(plain, restarts_left=0))
    assert (over.action, over.reason) == ("fail", "rank 2 failed (signal); no restarts left (--max-restarts)")


def test_after_the_training_nobody_joins_a_new_epoch() -> None:
    for changes in ({}, {"failures": (), "lost": (1,)}, {"budget": 0}):
        decision = decide(Policy(), view(nodes=NODES, finished=True, **changes))
        assert (decision.action, decision.repairs, decision.nodes) == ("finish", (), None)
        assert "already finished" in decision.reason


# ---- several nodes: a, b, c, d with two ranks each, in racks of their own

NODES = tuple(NodeView(name, 2, f"rack {name}") for name in "abcd")
SPARES = (Spare("x", 2, "rack x"), Spare("y", 2, "rack y"))
LOST = view(nodes=NODES, spares=SPARES, data=3, parity=1, failures=(), lost=(1,))


def lose(**changes: object) -> JobView:
    return msgspec.structs.replace(LOST, **changes)


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    assert decide(Policy(), LOST) == Decision(
        "repair",
        (Repair(2, 2, "replace"), Repair(3, 3, "replace")),
        "node b (position 1) lost; x takes the place of b",
        ("a", "x", "c", "d"),
    )


def test_a_worker_that_dies_besides_is_repaired_in_its_own_way() -> None:
    decision = decide(Policy(), lose(failures=failed(0, 2), shadows={0: "ready", 2: "ready"}))
    expected = (Repair(0, 0, "promote"), Repair(2, 2, "replace"), Repair(3, 3, "replace"))
    assert decision.repairs == expected, "rank 2 sat on the lost node, its shadow with it"
    assert decision.reason == "node b (position 1) lost, rank 0 failed (signal); x takes the place of b"


def test_a_failure_of_class_node_says_that_its_node_is_lost() -> None:
    told = lose(lost=(), failures=failed(3, cause=FailureClass.NODE))
    assert decide(Policy(), told) == decide(Policy(), LOST)


@pytest.mark.parametrize(
    ("lost", "spares", "nodes"),
    [
        ((1,), [("x", 2, "rack x"), ("y", 2, "rack b")], "aycd"),  # the same domain
        ((1,), [("x", 2, "rack a"), ("y", 2, "rack y")], "aycd"),  # a domain of its own
        ((1,), [("x", 2, "rack a"), ("y", 2, "rack c")], "axcd"),  # the first
        ((1,), [("x", 3, "rack b"), ("y", 1, "rack y"), ("z", 2, "rack a")], "azcd"),  # only one fits
        ((1, 2), [("x", 2, "rack c"), ("y", 2, "rack y")], "ayxd"),  # the same domain, for either place
        ((1, 2), [("x", 2, "rack x"), ("y", 2, "rack x")], "axyd"),  # in order
        ((2, 1), [("x", 2, "rack x"), ("y", 2, "rack x"), ("z", 2, "rack z")], "axzd"),  # apart from each other too
        ((1,), [("x", 2, "rack b"), ("y", 2, "rack b")], "axcd"),
    ],
)
def test_the_best_spare_is_taken(lost: tuple[int, ...], spares: list[tuple[str, int, str]], nodes: str) -> None:
    decision = decide(Policy(), lose(lost=lost, spares=tuple(Spare(*spare) for spare in spares), parity=2))
    assert decision.nodes == tuple(nodes)


def test_a_place_waits_for_a_spare_until_its_deadline() -> None:
    for spares in ((), (Spare("x", 3, "rack b"),)):
        waiting = decide(Policy(), lose(spares=spares, waited=599.0))
        assert waiting == Decision("wait", (), waiting.reason)
        said = "node b (position 1) lost; waiting at most 600 s (deadlines.replace) for a spare for b with 2 slots"
        assert waiting.reason == said
        over = decide(Policy(), lose(spares=spares, waited=600.0))
        assert over.action == "fail"
        assert over.reason.endswith("no spare for b with 2 slots came within 600 s (deadlines.replace)")
    assert decide(Policy(), lose(waited=601.0)).action == "repair", "it came at the last moment"


def test_two_lost_places_and_one_spare_wait() -> None:
    decision = decide(Policy(), lose(lost=(1, 3), spares=SPARES[:1], parity=2))
    assert decision.action == "wait"
    assert "for a spare for d with 2 slots" in decision.reason


def test_what_ends_the_job_does_not_wait() -> None:
    assert decide(Policy(), lose(spares=(), budget=0)).action == "fail"
    assert decide(Policy(), lose(spares=(), parity=0)).action == "fail"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lost": (1, 3)}, "2 nodes lost, RS(3, 1) covers 1"),
        ({"parity": 0, "data": 0}, "1 node lost, no global protection in force"),
        ({"lost": (0, 1, 3), "data": 2, "parity": 2}, "3 nodes lost, RS(2, 2) covers 2"),
        (
            {"failures": failed(0, cause=FailureClass.STATE)},
            "1 node lost, 1 node with damaged memory, RS(3, 1) covers 1",
        ),
        ({"protected": False}, "not every rank has committed its first step yet"),
    ],
)
def test_more_than_the_code_covers_is_not_tried(changes: dict[str, object], reason: str) -> None:
    decision = decide(Policy(), lose(**changes))
    assert (decision.action, decision.nodes) == ("fail", None)
    assert reason in decision.reason


def test_damaged_memory_is_restored_in_place() -> None:
    damaged = lose(lost=(), failures=failed(2, 3, cause=FailureClass.STATE))
    decision = decide(Policy(), damaged)
    assert decision.repairs == (Repair(2, 2, "restore"), Repair(3, 3, "restore")), "both on one node: one loss"
    assert decision.nodes is None
    apart = decide(Policy(), lose(lost=(), failures=failed(2, 4, cause=FailureClass.STATE)))
    assert "2 nodes with damaged memory, RS(3, 1) covers 1" in apart.reason


def test_the_local_tier_covers_one_slot_of_each_node() -> None:
    policy = Policy(protect=Protection(local=LocalProtection(parity=1)))
    damaged = failed(0, 2, 4, cause=FailureClass.STATE)
    assert decide(policy, lose(lost=(), parity=0, failures=damaged)).action == "repair"
    assert decide(policy, lose(failures=failed(0, cause=FailureClass.STATE))).action == "repair", "and a node besides"
    two = decide(policy, lose(lost=(), parity=0, failures=failed(0, 1, cause=FailureClass.STATE)))
    assert "1 node with damaged memory, no global protection in force" in two.reason


def test_a_ladder_for_lost_memory_knows_only_replace() -> None:
    def policy(*ladder: Action) -> Policy:
        return Policy(classes={**Policy().classes, **dict.fromkeys((FailureClass.NODE, FailureClass.STATE), ladder)})

    state = lose(lost=(), failures=failed(2, cause=FailureClass.STATE))
    passing = policy(Action.PROMOTE, Action.RESPAWN, Action.REPLACE, Action.FAIL)
    assert decide(passing, LOST) == decide(Policy(), LOST)
    assert decide(passing, state) == decide(Policy(), state)
    for ladder in ((Action.FAIL,), (Action.PROMOTE, Action.RESPAWN, Action.FAIL)):
        assert decide(policy(*ladder), LOST).reason.endswith(f"classes.node is [{', '.join(ladder)}]")
        assert decide(policy(*ladder), state).reason.endswith(f"classes.state is [{', '.join(ladder)}]")


def test_where_memory_is_not_lost_replace_is_passed_over() -> None:
    classes = {**Policy().classes, FailureClass.SIGNAL: (Action.REPLACE, Action.RESPAWN, Action.FAIL)}
    assert decide(Policy(classes=classes), VIEW).repairs == (Repair(2, 2, "respawn"),)


def test_a_lost_node_counts_as_one_failure() -> None:
    policy = Policy(limits=Limits(per_window=Window(failures=2, seconds=10.0)))
    with_workers = lose(failures=failed(0, 2, 3))
    assert (LOST.count, with_workers.count) == (1, 2)
    assert decide(policy, with_workers).action == "repair"
    past = (PastRecovery(1, 5, 95.0, failures=2),)
    assert "3 failures within 10 s" in decide(policy, lose(history=past)).reason
    same = tuple(PastRecovery(e, 7, 0.0) for e in (1, 2, 3))
    assert "step 7 was recovered 3 times already" in decide(Policy(), lose(history=same)).reason


def test_nodes_may_have_different_numbers_of_slots() -> None:
    nodes = (NodeView("a", 1, "a"), NodeView("b", 3, "b"), NodeView("c", 2, "c"))
    spares = (Spare("x", 2, "x"), Spare("y", 3, "y"))
    decision = decide(Policy(), lose(nodes=nodes, spares=spares))
    assert decision.nodes == ("a", "y", "c")
    assert decision.repairs == tuple(Repair(rank, rank, "replace") for rank in (1, 2, 3))


def test_a_job_that_never_called_init_is_restarted_with_a_spare() -> None:
    plain = lose(leto_job=False, protected=False, parity=0, restarts_left=1)
    decision = decide(Policy(), plain)
    assert (decision.action, decision.repairs, decision.nodes) == ("restart", (), ("a", "x", "c", "d"))
    waiting = msgspec.structs.replace(plain, spares=())
    assert decide(Policy(), waiting).action == "wait"
    assert decide(Policy(), msgspec.structs.replace(waiting, waited=600.0)).action == "fail"
    assert decide(Policy(), msgspec.structs.replace(waiting, restarts_left=0)).action == "fail", "nothing to wait for"


def test_deciding_depends_on_nothing_else() -> None:
    assert decide(Policy(), VIEW) == decide(Policy.decode(Policy().encode()), view())


def test_a_policy_travels() -> None:
    policy = Policy(deadlines=Deadlines(plan=12.5), limits=Limits(per_job=3))
    assert Policy.decode(policy.encode()) == policy


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: Deadlines(abort=30.0, plan=30.0), "abort"),
        (lambda: Deadlines(plan=1800.0), "plan"),
        (lambda: Deadlines(rebuild=50.0, collective=40.0), "rebuild"),
        (lambda: Deadlines(attach=40.0, collective=40.0), "attach"),
        (lambda: Deadlines(respawn=2000.0), "respawn"),
        (lambda: Deadlines(replace=2000.0), "replace"),
        (lambda: Deadlines(restore=2000.0), "restore"),
        (lambda: Deadlines(connect=300.0), "connect"),
        (lambda: Policy(hang=HangPolicy(min=1800.0)), "hang.min"),
        (lambda: Policy(hang=HangPolicy(first=1801.0)), "hang.first"),
        (lambda: Policy(hang=HangPolicy(heartbeat=1800.0)), "hang.heartbeat"),
        (lambda: HangPolicy(min=90.0, first=80.0), "first"),
        (lambda: HangPolicy(min=90.0, pause=80.0), "pause"),
        (lambda: Policy(coordinator=CoordinatorPolicy(lease=30)), "coordinator.lease"),
        (lambda: Policy(classes={FailureClass.EXIT: (Action.FAIL,)}), "classes"),
        (lambda: Policy(classes={**Policy().classes, FailureClass.EXIT: (Action.PROMOTE,)}), "classes.exit"),
        (
            lambda: Policy(deadlines=Deadlines(abort=0.1, plan=0.5), coordinator=CoordinatorPolicy(collect_ms=500.0)),
            "coordinator.collect_ms",
        ),
    ],
)
def test_contradictions_cannot_be_built(build: object, key: str) -> None:
    assert callable(build)
    with pytest.raises(PolicyError) as error:
        build()
    assert error.value.keys[0] == key


def test_a_contradiction_cannot_arrive_from_another_process_either() -> None:
    raw = msgspec.msgpack.decode(Policy().encode())
    raw["deadlines"]["abort"] = 31.0
    with pytest.raises(PolicyError):
        Policy.decode(msgspec.msgpack.encode(raw))
