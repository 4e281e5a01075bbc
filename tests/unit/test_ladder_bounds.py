"""No sequence of failures goes on for ever: an adversary fails what it likes, when it likes, and the job still ends.

The real decisions are made from the real mirror of the records, which are written as the leader writes them; the ranks
are those of the stories (`tests.scenarios.world`). The leader changes whenever the adversary wants it to.
"""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_elastic.coordinator.leader import Mirror
from leto_elastic.coordinator.schema import (
    BudgetRecord,
    FailureRecord,
    Keys,
    NodeRecord,
    PlanRecord,
    Seat,
    SlotRecord,
    encode,
)
from leto_elastic.recovery.ladder import Decision, decide
from leto_elastic.recovery.policy import Action, FailureClass, Limits, Policy, StepPolicy, Window
from tests.scenarios.world import World
from tests.unit.test_coordinator_records import Etcd

NODES, SLOTS, UNTIL = ("a", "b", "c"), 2, 4
RANKS = len(NODES) * SLOTS
KEYS = Keys("job")

ladders = st.permutations([Action.RETRY, Action.PROMOTE, Action.RESPAWN, Action.REPLACE]).flatmap(
    lambda rungs: st.integers(0, len(rungs)).map(lambda count: (*rungs[:count], Action.FAIL))
)
policies = st.builds(
    Policy,
    limits=st.builds(
        Limits,
        per_step=st.integers(1, 4),
        per_job=st.integers(0, 12),
        per_window=st.builds(Window, failures=st.integers(1, 40), seconds=st.floats(1.0, 100.0)),
    ),
    classes=st.fixed_dictionaries(dict.fromkeys(FailureClass, ladders)),
    step=st.builds(StepPolicy, skip=st.booleans()),
)


class Life:
    """A job of three nodes with two ranks each, from its first protected step on."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.etcd = Etcd()
        self.world = World(RANKS, UNTIL)
        self.now = 0.0
        self.epoch = 0
        self.seats = tuple(Seat(node=node, slots=SLOTS, domain=node, place=node) for node in NODES)
        self.mirror = Mirror(KEYS)
        self.tell(
            *((KEYS.node(node), encode(NodeRecord(host=node, pid=1, slots=SLOTS))) for node in (*NODES, "x", "y")),
            *((KEYS.slot(rank), encode(SlotRecord(rank=rank, pid=1, leto=True, protected=True)))
              for rank in range(RANKS)),
            (KEYS.start, encode(self.plan_of(0))),
            (KEYS.epoch, b"0"),
            (KEYS.leader, b"a"),
            (KEYS.budget, encode(BudgetRecord())),
        )  # fmt: skip

    def plan_of(self, epoch: int) -> PlanRecord:
        return PlanRecord(
            epoch=epoch, action="start", repairs=(), store_host="", store_port=1, reason="", failures=(), step=0,
            time=0.0, nodes=self.seats,
        )  # fmt: skip

    def tell(self, *puts: tuple[str, bytes]) -> None:
        self.mirror.apply(self.etcd.put(*puts))

    def another_leader(self) -> None:
        """Somebody else leads, who has read what there is; it knows all that the one before knew."""
        before, self.mirror = self.mirror, Mirror(KEYS)
        self.mirror.apply(self.etcd.snapshot())
        assert self.mirror.history == before.history
        assert self.mirror.failures == before.failures

    def shadow(self, rank: int, state: str) -> None:
        record = SlotRecord(rank=rank, pid=1, leto=True, protected=True, shadow=state)  # type: ignore[arg-type]
        self.tell((KEYS.slot(rank), encode(record)))

    def fail(self, epoch: int, rank: int, cause: FailureClass, held: bool, digest: str) -> None:
        key = KEYS.failure(epoch, rank)
        if key in self.etcd.entries:
            return  # create-once
        step = self.world.at[rank].step
        record = FailureRecord(rank=rank, slot=rank, pid=1, cause=cause, step=step, held=held, digest=digest)
        if epoch == self.epoch:
            self.world.kill(rank)
        self.tell((key, encode(record)))

    def decide(self) -> Decision:
        """As the leader does it."""
        view = self.mirror.view(self.policy, 0, self.now, (2, 1))
        decision = decide(self.policy, view)
        if decision.action == "wait":
            self.now += self.policy.deadlines.replace
            return decision
        plan, _ = self.mirror.planned_by(decision, view, ("h", 1), self.now)
        assert plan.epoch == self.epoch + 1
        budget = self.mirror.budget_after(decision)
        self.epoch += 1
        self.tell(
            (KEYS.plan(self.epoch), encode(plan)),
            (KEYS.epoch, str(self.epoch).encode()),
            (KEYS.budget, encode(budget)),
        )
        covered = {repair.rank for repair in decision.repairs}
        failed = {failure.rank for failure in view.failures}
        assert decision.action != "repair" or failed <= covered, "nobody is left without a process"
        return decision


ranks = st.integers(0, RANKS - 1)
blow = st.tuples(ranks, st.sampled_from(FailureClass), st.booleans(), st.sampled_from(["", "d"]))
# How far the job gets before it is hit, how many epochs late a report is, by what, and whether the leader changes.
turns = st.tuples(st.integers(0, 30), st.integers(0, 2), st.lists(blow, min_size=1, max_size=RANKS), st.booleans())


@settings(max_examples=150, deadline=None)
@given(policies, st.lists(turns, min_size=1, max_size=8), st.lists(st.sampled_from(["none", "ready"]), max_size=RANKS))
def test_whatever_fails_whenever_the_job_ends(
    policy: Policy,
    adversary: list[tuple[int, int, list[tuple[int, FailureClass, bool, str]], bool]],
    shadows: list[str],
) -> None:
    """The adversary's turns are repeated until the job has ended."""
    life = Life(policy)
    for rank, state in enumerate(shadows):
        life.shadow(rank, state)
    repairs = decisions = turn = 0
    skipped = -1
    while True:
        assert decisions <= 2 * policy.limits.per_job + 2, "each plan costs one recovery, and may wait once before"
        moves, late, blows, changes = adversary[turn % len(adversary)]
        turn += 1
        before = {rank: at.step for rank, at in life.world.at.items()}
        for move in range(moves):
            life.world.move(move % RANKS)
        for rank, cause, held, digest in blows:
            life.fail(life.epoch - (late if rank else 0), rank, cause, held, digest)
        if changes:
            life.another_leader()
        if not life.mirror.failures:  # every report was late
            life.fail(life.epoch, 0, FailureClass.SIGNAL, False, "")
        decision = life.decide()
        decisions += 1
        if decision.action == "fail":
            break
        if decision.action == "repair":
            repairs += 1
            assert decision.skip == -1 or decision.skip >= skipped - 1
            skipped = max(skipped, decision.skip)
            life.world.recover()
            assert all(at.step >= before[rank] for rank, at in life.world.at.items()), "no step is lost"
    assert repairs <= policy.limits.per_job
    steps = [past.step for past in life.mirror.history]
    assert all(steps.count(step) <= policy.limits.per_step for step in steps)
    same = [
        (cause.rank, cause.cause, cause.step, cause.action)
        for past in life.mirror.history
        for cause in past.causes
        if cause.cause in (FailureClass.EXCEPTION, FailureClass.OOM, FailureClass.HANG)
        and cause.action != "replace"  # of its node, which was lost besides
        and past.skip != cause.step
    ]
    assert len(set(same)) == len(same), "no rung twice for the same failure"


@given(st.integers(0, 3), st.integers(0, 3))
def test_a_report_of_an_older_epoch_changes_nothing(epoch: int, current: int) -> None:
    life = Life(Policy())
    for _ in range(current):
        life.fail(life.epoch, 1, FailureClass.SIGNAL, False, "")
        life.decide()
        life.world.recover()
    if epoch < current:
        life.fail(epoch, 0, FailureClass.EXCEPTION, True, "d")
        assert life.mirror.failures == {}
        life.another_leader()
        assert life.mirror.failures == {}


def test_a_failure_after_the_plan_is_in_the_history_of_the_next_one() -> None:
    life = Life(msgspec.structs.replace(Policy(), step=StepPolicy(skip=True)))
    life.shadow(2, "ready")
    for held, action, skip in ((False, "promote", -1), (True, "retry", 0)):
        life.fail(life.epoch, 2, FailureClass.EXCEPTION, held, "d")
        life.another_leader()
        decision = life.decide()
        assert [(repair.rank, repair.action) for repair in decision.repairs] == [(2, action)]
        assert decision.skip == skip
        life.world.recover()
    assert [past.skip for past in life.mirror.history] == [-1, 0]
