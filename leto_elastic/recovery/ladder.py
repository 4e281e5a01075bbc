"""From failures to a decision: the pure function that climbs the policy's ladders.

`decide` sees nothing but its arguments: no clock, no socket. The leader calls it, and whoever leads next comes to the
same decision from the same records.

Guarantees, whatever fails, whenever:
  * each plan to repair uses up one of `limits.per_job`, of `limits.per_step` for its step, and of the window for each
    failure, and none of them is ever given back: so no sequence of failures goes on for ever;
  * a failure that comes back by itself (`RECURRING`: an exception, memory that runs out, a hang) never gets the same
    rung twice at the same step on the same rank. A death by exit or signal may well be another one from outside, so
    it gets the same rung again, up to the limits;
  * what every rank of the world runs into alike is a mistake in the program, and is not tried again at all;
  * a step that was decided to be stepped over is so in every later plan until the job is past it, whatever fails
    meanwhile: some ranks may have stepped over it already.

A failure of class `state` does not count as recurring: a process that dies on the way to its restored memory is of this
class too, and says nothing of that memory. `limits.per_step` ends what does come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

import msgspec

from leto_elastic.recovery.policy import Action, FailureClass, Policy
from leto_elastic.recovery.spares import NodeView, Spare, fill

__all__ = [
    "RECURRING", "Cause", "Decision", "Failure", "JobView", "NodeView", "PastRecovery", "Repair", "ShadowState",
    "Spare", "causes_of", "decide", "remember",
]  # fmt: skip

ShadowState = Literal["none", "starting", "ready", "unfit"]

RECURRING = frozenset({FailureClass.EXCEPTION, FailureClass.OOM, FailureClass.HANG})
"""Classes whose second failure at the same step, on the same rank, gets the next rung."""


class Failure(msgspec.Struct, frozen=True):
    """One failed worker.

    Args:
        rank, slot: of the worker.
        cause: class of the failure.
        step: where its header stood.
        held: its process is alive and holds the exception, so that it can run the step again.
        digest: of the exception, equal for equal ones; "" for none.
        detail: for a human.
    """

    rank: int
    slot: int
    cause: FailureClass
    step: int
    held: bool = False
    digest: str = ""
    detail: str = ""


class Cause(msgspec.Struct, frozen=True):
    """A failure that was repaired before, and by which action; "" when nothing was done about it."""

    rank: int
    cause: FailureClass
    step: int
    action: str
    digest: str = ""


class PastRecovery(msgspec.Struct, frozen=True):
    """A plan to repair that was made before.

    Args:
        epoch: that it led to.
        step: that it was for.
        time: when, in seconds.
        failures: how many, as limits count them.
        causes: what had failed.
        skip: the step that it stepped over; -1: none.
    """

    epoch: int
    step: int
    time: float
    failures: int = 1
    causes: tuple[Cause, ...] = ()
    skip: int = -1


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decision depends on.

    Args:
        epoch: the epoch that the failures ended.
        step_of_failure: the step that the job stood at, for `limits.per_step`.
        failures: workers that failed; at least one, unless a node is lost. Those on a lost node change nothing, except
            that one of class `node` says that its node is lost.
        shadows: state of the shadow of each slot; a slot that is missing has none.
        protected: every slot's state is in segments of its agent (so it outlives any worker).
        leto_job: some worker called `leto.init()`.
        finished: some worker has finished the training and left it, so it cannot come back to join an epoch.
        history: the plans to repair made so far.
        now: same clock as `PastRecovery.time`, seconds.
        restarts_left: whole-group restarts left (`--max-restarts`).
        budget: recoveries left to the job (`limits.per_job`).
        lost: positions whose node is gone.
        nodes: the node at each position; the ranks count through them in order. Empty in a job of one node.
        spares: nodes that wait for a place, first the one to be preferred.
        data, parity: the code RS(data, parity) in force over the nodes; parity 0: no global protection.
        waited: seconds since the loss.
    """

    epoch: int
    step_of_failure: int
    failures: tuple[Failure, ...]
    shadows: Mapping[int, ShadowState]
    protected: bool
    leto_job: bool
    finished: bool
    history: tuple[PastRecovery, ...]
    now: float
    restarts_left: int
    budget: int
    lost: tuple[int, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    spares: tuple[Spare, ...] = ()
    data: int = 0
    parity: int = 0
    waited: float = 0.0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(node.slots for node in self.nodes) or len(self.shadows)

    def ranks_of(self, position: int) -> range:
        """The ranks at a position."""
        base = sum(node.slots for node in self.nodes[:position])
        return range(base, base + self.nodes[position].slots)

    def position_of(self, rank: int) -> int:
        """Where a rank sits."""
        return next((position for position in range(len(self.nodes)) if rank in self.ranks_of(position)), 0)

    @property
    def gone(self) -> tuple[int, ...]:
        """Positions of lost nodes, in order."""
        told = {self.position_of(f.rank) for f in self.failures if f.cause is FailureClass.NODE}
        return tuple(sorted({*self.lost, *told}))

    @property
    def alone(self) -> tuple[Failure, ...]:
        """Failed workers whose node lives, by rank."""
        gone = self.gone
        return tuple(sorted((f for f in self.failures if self.position_of(f.rank) not in gone), key=lambda f: f.rank))

    @property
    def count(self) -> int:
        """The failures as limits count them, for `PastRecovery.failures`: a lost node is one, whatever ran on it."""
        return len(self.alone) + len(self.gone)


class Repair(msgspec.Struct, frozen=True):
    """How one failed rank goes on: "retry" in the process that holds the exception, the others by another process;
    "replace" on a spare, "restore" where it was, both without memory.
    """

    rank: int
    slot: int
    action: Literal["retry", "promote", "respawn", "replace", "restore"]


class Decision(msgspec.Struct, frozen=True):
    """What to do about a failure; `reason` is for a human.

    Args:
        action: "repair" in place, "restart" the whole group, "wait" for a spare and decide again, "finish" (training is
            over: nobody builds an epoch any more, everyone who waits is released), or "fail".
        nodes: for a repair or restart that changes them, the id of the node at each position from then on.
        skip: for a repair, the step that ranks which still stand at it step over, its batch unused; -1: none.
    """

    action: Literal["repair", "restart", "wait", "finish", "fail"]
    repairs: tuple[Repair, ...]
    reason: str
    nodes: tuple[str, ...] | None = None
    skip: int = -1


class _Told(Protocol):
    """What `causes_of` needs of a failure, or of its record."""

    @property
    def rank(self) -> int: ...

    @property
    def cause(self) -> FailureClass: ...

    @property
    def step(self) -> int: ...

    @property
    def digest(self) -> str: ...


def causes_of(failures: Iterable[_Told], repairs: Iterable[Repair]) -> tuple[Cause, ...]:
    """The failures of a plan together with what it did about them."""
    actions: dict[int, str] = {repair.rank: repair.action for repair in repairs}
    return tuple(Cause(f.rank, f.cause, f.step, actions.get(f.rank, ""), f.digest) for f in failures)


def remember(view: JobView, decision: Decision) -> PastRecovery:
    """A decision to repair, as the history of the next one has it."""
    causes = causes_of(view.failures, decision.repairs)
    return PastRecovery(view.epoch + 1, view.step_of_failure, view.now, view.count, causes, decision.skip)


def decide(policy: Policy, view: JobView) -> Decision:
    """The decision for the failures of one epoch.

    A job that never called `leto.init()` is restarted as a whole, as torchrun does it. Any other is repaired in place,
    unless the training was over, a slot is not protected yet, all ranks raised the same error, a limit is reached, more
    memory is lost than the code covers, or the ladder of a failure's class arrives at fail. A lost node's place is
    taken by a spare, or waits for one until `deadlines.replace`.
    """
    who = _who(view)
    skip = _skip(policy, view)
    if view.leto_job and view.finished:
        return Decision("finish", (), f"{who}; the training was already finished, so nobody joins a new epoch")
    if not view.leto_job and view.restarts_left <= 0:
        return Decision("fail", (), f"{who}; no restarts left (--max-restarts)")
    repairs: list[Repair] = []
    if view.leto_job:
        if view.protected and (error := _common_error(view)) is not None:
            return Decision("fail", (), error)
        obstacle = _obstacle(policy, view) or _overwhelmed(policy, view) or _climb_all(policy, view, skip, repairs)
        if obstacle is not None:
            return Decision("fail", (), "; ".join([who, obstacle, *_out_of_memory(view)]))
    taken = fill(view.gone, view.nodes, view.spares)
    if missing := [position for position in view.gone if position not in taken]:
        return _without_spare(policy, view, missing, who)
    members = [taken[i].node_id if i in taken else node.node_id for i, node in enumerate(view.nodes)]
    nodes = tuple(members) if taken else None
    if not view.leto_job:
        return Decision("restart", (), f"{who}; whole group, {view.restarts_left} restarts left", nodes)
    repairs += [Repair(rank, rank, "replace") for position in view.gone for rank in view.ranks_of(position)]
    repairs.sort(key=lambda repair: repair.rank)
    notes = [f"{taken[i].node_id} takes the place of {view.nodes[i].node_id}" for i in view.gone]
    notes += [note for failure in view.alone if (note := _in_vain(policy, view, failure, skip))]
    notes += [f"step {skip} is stepped over (step.skip)"] if skip >= 0 else []
    return Decision("repair", tuple(repairs), "; ".join([who, *notes]), nodes, skip)


def _who(view: JobView) -> str:
    nodes = [f"node {view.nodes[position].node_id} (position {position}) lost" for position in view.gone]
    return ", ".join([*nodes, *(f"rank {f.rank} failed ({_what(f)})" for f in view.alone)])


def _what(failure: Failure) -> str:
    return f"{failure.cause}: {failure.detail}" if failure.detail else str(failure.cause)


def _common_error(view: JobView) -> str | None:
    """The error that every rank of the world raised in this step, now or when it was run before; None: none."""
    details = {(f.digest, f.step): f.detail for f in view.alone if f.cause is FailureClass.EXCEPTION and f.digest}
    told: list[_Told] = [cause for past in view.history for cause in past.causes]
    for (digest, step), detail in details.items():
        alike = {one.rank for one in [*told, *view.alone] if one.digest == digest and one.step == step}
        if 1 < view.size <= len(alike):
            return f"every rank raised the same error in step {step}: {detail or digest}"
    return None


def _skip(policy: Policy, view: JobView) -> int:
    """The step to be stepped over, or -1."""
    step = view.step_of_failure
    if view.history and view.history[-1].skip >= max(0, step - 1):  # some ranks may be past it, others not yet
        return view.history[-1].skip
    raised = all(f.cause is FailureClass.EXCEPTION and f.step == step for f in view.alone)
    if not policy.step.skip or view.gone or not view.failures or not raised:
        return -1
    before = (cause for past in view.history for cause in past.causes)
    return step if any(c.cause is FailureClass.EXCEPTION and c.step == step for c in before) else -1


def _obstacle(policy: Policy, view: JobView) -> str | None:
    """Why nothing may be repaired in place at all, or None."""
    limits = policy.limits
    if not view.protected:
        return "not every rank has committed its first step yet, so there is no state to go on from"
    if view.budget <= 0:
        return "no recoveries left (limits.per_job or --max-restarts)"
    same = sum(past.step == view.step_of_failure for past in view.history)
    if same >= limits.per_step:
        times = "1 time" if same == 1 else f"{same} times"
        return f"step {view.step_of_failure} was recovered {times} already (limits.per_step)"
    window = limits.per_window
    recent = view.count + sum(p.failures for p in view.history if p.time > view.now - window.seconds)
    if recent > window.failures:
        return f"{recent} failures within {window.seconds:g} s (limits.per_window allows {window.failures})"
    return None


def _overwhelmed(policy: Policy, view: JobView) -> str | None:
    """Why the lost memory is more than the code covers, or None. What the keepers really hold is only known later."""
    damaged = [view.position_of(f.rank) for f in view.alone if f.cause is FailureClass.STATE]
    covered = {position for position in damaged if policy.protect.local.parity and damaged.count(position) == 1}
    hurt = set(damaged) - covered
    if len(view.gone) + len(hurt) <= view.parity:
        return None
    lost = [f"{_nodes(len(view.gone))} lost"] if view.gone else []
    lost += [f"{_nodes(len(hurt))} with damaged memory"] if hurt else []
    covers = f"RS({view.data}, {view.parity}) covers {view.parity}" if view.parity else "no global protection in force"
    return ", ".join([*lost, covers])


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _climb_all(policy: Policy, view: JobView, skip: int, repairs: list[Repair]) -> str | None:
    """Append what to do about each failed worker whose node lives. The ladder that ends the job instead, or None."""
    for failure in view.alone:
        shadow = view.shadows.get(failure.slot, "none")
        match _climb(policy, view, failure, skip):
            case Action.RETRY:
                repairs.append(Repair(failure.rank, failure.slot, "retry"))
            case Action.PROMOTE:
                repairs.append(Repair(failure.rank, failure.slot, "promote"))
            case Action.RESPAWN:
                repairs.append(Repair(failure.rank, failure.slot, "respawn"))
            case Action.REPLACE:
                repairs.append(Repair(failure.rank, failure.slot, "restore"))
            case Action.FAIL:
                said = _ladder(policy, failure.cause)
                if failure.cause is not FailureClass.STATE:
                    said += f" and the shadow of slot {failure.slot} is: {shadow}"
                vain = _in_vain(policy, view, failure, skip)
                return f"{said}; {vain}" if vain else said
    if view.gone and Action.REPLACE not in policy.classes[FailureClass.NODE]:
        return _ladder(policy, FailureClass.NODE)
    return None


def _climb(policy: Policy, view: JobView, failure: Failure, skip: int) -> Action:
    """The first rung above those that were in vain that is possible: where memory is lost only its replacement,
    elsewhere only a process is; running the step again needs the process that failed, alive.
    """
    if failure.cause is FailureClass.EXCEPTION and failure.step == skip and failure.held:
        return Action.RETRY  # it does not run the step again, so whatever became of that is of no matter
    if failure.cause in (FailureClass.NODE, FailureClass.STATE):
        possible = {Action.REPLACE, Action.FAIL}
    else:
        possible = {Action.RESPAWN, Action.FAIL}
        possible |= {Action.PROMOTE} if view.shadows.get(failure.slot) == "ready" else set()
        possible |= {Action.RETRY} if failure.held else set()
    ladder = policy.classes[failure.cause]
    passed = max((ladder.index(rung) + 1 for rung in _tried(policy, view, failure, skip)), default=0)
    return next(action for action in ladder[passed:] if action in possible)


def _tried(policy: Policy, view: JobView, failure: Failure, skip: int) -> list[Action]:
    """The rungs that were taken before for the same failure of the same rank at the same step, in vain."""
    if failure.cause not in RECURRING or failure.step == skip:
        return []
    same = (failure.rank, failure.cause, failure.step)
    taken = {c.action for past in view.history for c in past.causes if (c.rank, c.cause, c.step) == same}
    return [rung for rung in policy.classes[failure.cause] if rung.value in taken]


def _in_vain(policy: Policy, view: JobView, failure: Failure, skip: int) -> str:
    tried = " and ".join(_tried(policy, view, failure, skip))
    return f"rank {failure.rank} failed so at step {failure.step} before, {tried} did not help" if tried else ""


def _out_of_memory(view: JobView) -> list[str]:
    """How often, where and when the job has run out of memory, if it did so now and before."""
    if all(failure.cause is not FailureClass.OOM for failure in view.alone):
        return []
    told: list[_Told] = [cause for past in view.history for cause in past.causes]
    steps: dict[int, list[int]] = {}
    for one in [*told, *view.alone]:
        if one.cause is FailureClass.OOM:
            steps.setdefault(one.rank, []).append(one.step)
    times = sum(map(len, steps.values()))
    where = [f"rank {rank} at {_steps(at)}" for rank, at in sorted(steps.items())]
    return [f"out of memory {times} times: {'; '.join(where)}"] if times > 1 else []


def _steps(steps: list[int]) -> str:
    """Each step once, with how many times; the last ten."""
    last = sorted(set(steps))[-10:]
    counts = {step: steps.count(step) for step in last}
    several = len(counts) > 1
    earlier = " and earlier ones" if len(last) < len(set(steps)) else ""
    listed = ", ".join(f"{step} ({count} times)" if count > 1 else str(step) for step, count in counts.items())
    return f"{'steps' if several else 'step'} {listed}{earlier}"


def _ladder(policy: Policy, cause: FailureClass) -> str:
    return f"classes.{cause} is [{', '.join(policy.classes[cause])}]"


def _without_spare(policy: Policy, view: JobView, missing: list[int], who: str) -> Decision:
    """Wait for a spare, or the end of the wait."""
    limit = policy.deadlines.replace
    needed = ", ".join(f"{view.nodes[i].node_id} with {view.nodes[i].slots} slots" for i in missing)
    if view.waited < limit:
        return Decision("wait", (), f"{who}; waiting at most {limit:g} s (deadlines.replace) for a spare for {needed}")
    return Decision("fail", (), f"{who}; no spare for {needed} came within {limit:g} s (deadlines.replace)")
