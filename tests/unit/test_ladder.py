"""The ladder of what comes back by itself, and steps that are stepped over."""

from __future__ import annotations

import msgspec
import pytest

from leto_elastic.recovery.ladder import RECURRING, Cause, Decision, Failure, PastRecovery, Repair, decide, remember
from leto_elastic.recovery.policy import Action, FailureClass, Limits, Policy, StepPolicy
from tests.unit.test_policy import lose, view


def again(*recoveries: tuple[int, Failure, str], skip: int = -1) -> tuple[PastRecovery, ...]:
    """A history: (step, failure, action) each."""
    return tuple(
        PastRecovery(
            epoch, step, 0.0, 1, (Cause(f.rank, f.cause, f.step, action, f.digest),), skip if epoch == 1 else -1
        )
        for epoch, (step, f, action) in enumerate(recoveries, 1)
    )


CLIMBING = (Action.RETRY, Action.PROMOTE, Action.RESPAWN, Action.FAIL)
PATIENT = Policy(
    classes={**Policy().classes, **dict.fromkeys(RECURRING, CLIMBING), FailureClass.EXIT: CLIMBING},
    limits=Limits(per_step=100),
)


def raised(rank: int = 2, step: int = 7, *, held: bool = True, digest: str = "") -> Failure:
    return Failure(rank, rank, FailureClass.EXCEPTION, step, held, digest, "ValueError: bad batch")


@pytest.mark.parametrize("cause", sorted(RECURRING))
def test_the_same_failure_at_the_same_step_gets_the_next_rung(cause: FailureClass) -> None:
    failure = Failure(2, 2, cause, 7, held=True)
    history: tuple[PastRecovery, ...] = ()
    for rung in ("retry", "promote", "respawn"):
        decision = decide(PATIENT, view(failures=(failure,), history=history))
        assert decision.repairs == (Repair(2, 2, rung),)  # type: ignore[arg-type]
        history = (*history, remember(view(failures=(failure,), epoch=len(history)), decision))
    over = decide(PATIENT, view(failures=(failure,), history=history))
    assert over.action == "fail"
    assert "rank 2 failed so at step 7 before, retry and promote and respawn did not help" in over.reason


def test_a_rung_below_one_that_was_in_vain_is_not_taken_either() -> None:
    failure = raised(held=False)
    history = again((7, failure, "respawn"))  # there was no shadow then, now there is
    assert decide(Policy(), view(failures=(failure,), history=history)).action == "fail"


@pytest.mark.parametrize("cause", [FailureClass.EXIT, FailureClass.SIGNAL])
def test_a_death_from_outside_may_happen_again(cause: FailureClass) -> None:
    failure = Failure(2, 2, cause, 7)
    history = again((7, failure, "promote"), (7, failure, "promote"))
    assert decide(Policy(), view(failures=(failure,), history=history)).repairs == (Repair(2, 2, "promote"),)


@pytest.mark.parametrize(
    "past",
    [
        (7, raised(rank=1), "promote"),
        (6, raised(step=6), "promote"),
        (7, Failure(2, 2, FailureClass.SIGNAL, 7), "promote"),
        (7, Failure(2, 2, FailureClass.OOM, 7), "promote"),
        (8, raised(step=8), "promote"),
    ],
)
def test_another_rank_step_or_class_has_its_own_ladder(past: tuple[int, Failure, str]) -> None:
    decision = decide(Policy(), view(failures=(raised(),), history=again(past)))
    assert decision.repairs == (Repair(2, 2, "promote"),)
    assert "did not help" not in decision.reason


def test_only_a_process_that_is_there_can_run_a_step_again() -> None:
    assert decide(PATIENT, view(failures=(raised(),))).repairs == (Repair(2, 2, "retry"),)
    assert decide(PATIENT, view(failures=(raised(held=False),))).repairs == (Repair(2, 2, "promote"),)
    assert decide(Policy(), view(failures=(raised(),))).repairs == (Repair(2, 2, "promote"),), "not on its ladder"


def test_damaged_memory_gets_replace_again() -> None:
    failure = Failure(2, 2, FailureClass.STATE, 7)  # the class also of a process that dies on the way to it
    decision = decide(Policy(), lose(lost=(), failures=(failure,), history=again((7, failure, "restore"))))
    assert decision.repairs == (Repair(2, 2, "restore"),)


def test_the_detail_is_told() -> None:
    assert decide(Policy(), view(failures=(raised(),))).reason == "rank 2 failed (exception: ValueError: bad batch)"


def test_out_of_memory_is_told_with_numbers() -> None:
    def oom(rank: int, step: int = 7) -> Failure:
        return Failure(rank, rank, FailureClass.OOM, step)

    history = again((5, oom(3, 5), "promote"), (7, oom(2), "promote"), (7, oom(2), "respawn"))
    over = decide(Policy(), view(failures=(oom(2),), history=history))
    assert over.action == "fail"
    assert over.reason.endswith("out of memory 4 times: rank 2 at step 7 (3 times); rank 3 at step 5")
    one = decide(Policy(limits=Limits(per_job=1)), view(failures=(oom(2),), budget=0))
    assert "out of memory" not in one.reason, "one time needs no counting"
    limit = again(*((7, oom(rank), "promote") for rank in (0, 1, 3)))
    last = decide(Policy(), view(failures=(oom(2),), history=limit))
    assert "limits.per_step); out of memory 4 times: rank 0 at step 7; rank 1" in last.reason
    long = again(*((step, oom(2, step), "promote") for step in range(100, 130)))
    ended = decide(Policy(), view(failures=(oom(2),), history=long, budget=0))
    assert "out of memory 31 times: rank 2 at steps 120, 121," in ended.reason
    assert ended.reason.endswith(", 128, 129 and earlier ones")


def test_what_every_rank_raises_ends_the_job_at_once() -> None:
    alike = tuple(raised(rank, digest="d") for rank in range(4))
    over = decide(PATIENT, view(failures=alike))
    assert over == Decision("fail", (), "every rank raised the same error in step 7: ValueError: bad batch")
    for others in (alike[:3], (*alike[:3], raised(3, digest="e")), tuple(raised(rank) for rank in range(4))):
        assert decide(PATIENT, view(failures=others)).action == "repair"
    one = decide(PATIENT, view(shadows={2: "ready"}, failures=(raised(digest="d"),)))
    assert one.action == "repair", "a world of one rank is no witness"


def test_that_they_are_reported_one_after_the_other_makes_no_difference() -> None:
    history = again(*((7, raised(rank, digest="d"), "retry") for rank in range(3)))
    assert "every rank" in decide(PATIENT, view(failures=(raised(3, digest="d"),), history=history)).reason
    earlier = again(*((6, raised(rank, step=6, digest="d"), "retry") for rank in range(3)))
    assert decide(PATIENT, view(failures=(raised(3, digest="d"),), history=earlier)).action == "repair"


# ---- steps that are stepped over


SKIPPING = msgspec.structs.replace(PATIENT, step=StepPolicy(skip=True))


def test_a_step_that_raises_again_is_stepped_over() -> None:
    first = decide(SKIPPING, view(failures=(raised(),)))
    assert (first.skip, first.repairs) == (-1, (Repair(2, 2, "retry"),))
    history = again((7, raised(), "retry"))
    second = decide(SKIPPING, view(failures=(raised(), raised(3, held=False)), history=history))
    assert second.skip == 7
    assert second.repairs == (Repair(2, 2, "retry"), Repair(3, 3, "promote"))
    assert second.reason.endswith("; step 7 is stepped over (step.skip)")
    assert decide(PATIENT, view(failures=(raised(),), history=history)).skip == -1, "not without being asked for"


def test_a_held_process_steps_over_whatever_its_ladder() -> None:
    policy = Policy(step=StepPolicy(skip=True))
    history = again((7, raised(rank=1), "promote"))
    assert decide(policy, view(failures=(raised(),), history=history)).repairs == (Repair(2, 2, "retry"),)


@pytest.mark.parametrize(
    "changes",
    [
        {"history": again((7, Failure(2, 2, FailureClass.OOM, 7), "promote"))},
        {"history": again((6, raised(step=6), "promote"))},
        {"failures": (raised(), Failure(1, 1, FailureClass.SIGNAL, 7))},
        {"failures": (raised(), raised(1, step=6))},
    ],
)
def test_only_an_exception_at_the_same_step_is_stepped_over(changes: dict[str, object]) -> None:
    usual = {"failures": (raised(),), "history": again((7, raised(), "retry"))}
    assert decide(SKIPPING, view(**usual)).skip == 7
    assert decide(SKIPPING, view(**{**usual, **changes})).skip == -1


def test_with_a_node_lost_besides_the_step_is_run_again() -> None:
    assert decide(SKIPPING, lose(failures=(raised(0),), history=again((7, raised(0), "retry")))).skip == -1


@pytest.mark.parametrize(("at", "skip"), [(6, 7), (7, 7), (8, 7), (9, -1)])
def test_a_step_is_stepped_over_until_the_job_is_past_it(at: int, skip: int) -> None:
    """The recovery that steps over it is itself interrupted, when some ranks are past it and others are not."""
    history = again((7, raised(), "retry"), skip=7)
    killed = Failure(1, 1, FailureClass.SIGNAL, at)
    assert decide(SKIPPING, view(failures=(killed,), step_of_failure=at, history=history)).skip == skip


def test_stepping_over_counts_as_a_recovery_of_the_step() -> None:
    history = again(*((7, raised(), "retry") for _ in range(3)))
    policy = Policy(step=StepPolicy(skip=True), limits=Limits(per_step=3))
    assert "limits.per_step" in decide(policy, view(failures=(raised(),), history=history)).reason
