"""Decisions: pure, so each one is a table line."""

from __future__ import annotations

import msgspec
import pytest

from leto_elastic.recovery.policy import (
    Action,
    CoordinatorPolicy,
    Deadlines,
    Decision,
    Failure,
    FailureClass,
    JobView,
    Limits,
    PastRecovery,
    Policy,
    PolicyError,
    Repair,
    ShadowState,
    Window,
    decide,
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
        ({"finished": True}, "already finished"),
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
