"""From failures to a decision: the pure function that climbs the policy's ladders.

`decide` sees nothing but its arguments: no clock, no socket. The leader calls it, and whoever leads next comes to the
same decision from the same records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from leto_elastic.recovery.policy import Action, FailureClass, Policy
from leto_elastic.recovery.spares import NodeView, Spare, fill

__all__ = [
    "Decision", "Failure", "JobView", "NodeView", "PastRecovery", "Repair", "ShadowState", "Spare", "decide",
]  # fmt: skip

ShadowState = Literal["none", "starting", "ready", "unfit"]


class Failure(msgspec.Struct, frozen=True):
    """One failed worker; `step` is where its header stood."""

    rank: int
    slot: int
    cause: FailureClass
    step: int


class PastRecovery(msgspec.Struct, frozen=True):
    """A plan to repair that was made before: the epoch it led to, the step it was for, when (s), how many failures."""

    epoch: int
    step: int
    time: float
    failures: int = 1


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
    """How one failed rank gets a process again; "replace" on a spare, "restore" where it was, both without memory."""

    rank: int
    slot: int
    action: Literal["promote", "respawn", "replace", "restore"]


class Decision(msgspec.Struct, frozen=True):
    """What to do about a failure; `reason` is for a human.

    Args:
        action: "repair" in place, "restart" the whole group, "wait" for a spare and decide again, "finish" (training is
            over: nobody builds an epoch any more, everyone who waits is released), or "fail".
        nodes: for a repair or restart that changes them, the id of the node at each position from then on.
    """

    action: Literal["repair", "restart", "wait", "finish", "fail"]
    repairs: tuple[Repair, ...]
    reason: str
    nodes: tuple[str, ...] | None = None


def decide(policy: Policy, view: JobView) -> Decision:
    """The decision for the failures of one epoch.

    A job that never called `leto.init()` is restarted as a whole, as torchrun does it. Any other is repaired in place,
    unless the training was over, a slot is not protected yet, a limit is reached, more memory is lost than the code
    covers, or the ladder of a failure's class arrives at fail. A lost node's place is taken by a spare, or waits for
    one until `deadlines.replace`.
    """
    who = _who(view)
    if view.leto_job and view.finished:
        return Decision("finish", (), f"{who}; the training was already finished, so nobody joins a new epoch")
    if not view.leto_job and view.restarts_left <= 0:
        return Decision("fail", (), f"{who}; no restarts left (--max-restarts)")
    repairs: list[Repair] = []
    if view.leto_job:
        obstacle = _obstacle(policy, view) or _overwhelmed(policy, view) or _climb_all(policy, view, repairs)
        if obstacle is not None:
            return Decision("fail", (), f"{who}; {obstacle}")
    taken = fill(view.gone, view.nodes, view.spares)
    if missing := [position for position in view.gone if position not in taken]:
        return _without_spare(policy, view, missing, who)
    members = [taken[i].node_id if i in taken else node.node_id for i, node in enumerate(view.nodes)]
    nodes = tuple(members) if taken else None
    if not view.leto_job:
        return Decision("restart", (), f"{who}; whole group, {view.restarts_left} restarts left", nodes)
    repairs += [Repair(rank, rank, "replace") for position in view.gone for rank in view.ranks_of(position)]
    repairs.sort(key=lambda repair: repair.rank)
    where = [f"{taken[i].node_id} takes the place of {view.nodes[i].node_id}" for i in view.gone]
    return Decision("repair", tuple(repairs), "; ".join([who, *where]), nodes)


def _who(view: JobView) -> str:
    nodes = [f"node {view.nodes[position].node_id} (position {position}) lost" for position in view.gone]
    return ", ".join([*nodes, *(f"rank {f.rank} failed ({f.cause})" for f in view.alone)])


def _obstacle(policy: Policy, view: JobView) -> str | None:
    """Why nothing may be repaired in place at all, or None."""
    limits = policy.limits
    if not view.protected:
        return "not every rank has committed its first step yet, so there is no state to go on from"
    if view.budget <= 0:
        return "no recoveries left (limits.per_job or --max-restarts)"
    same = sum(past.step == view.step_of_failure for past in view.history)
    if same >= limits.per_step:
        return f"step {view.step_of_failure} was recovered {same} times already (limits.per_step)"
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


def _climb_all(policy: Policy, view: JobView, repairs: list[Repair]) -> str | None:
    """Append what to do about each failed worker whose node lives. The ladder that ends the job instead, or None."""
    for failure in view.alone:
        shadow = view.shadows.get(failure.slot, "none")
        match _climb(policy, failure.cause, shadow):
            case Action.PROMOTE:
                repairs.append(Repair(failure.rank, failure.slot, "promote"))
            case Action.RESPAWN:
                repairs.append(Repair(failure.rank, failure.slot, "respawn"))
            case Action.REPLACE:
                repairs.append(Repair(failure.rank, failure.slot, "restore"))
            case _:
                said = f" and the shadow of slot {failure.slot} is: {shadow}"
                return _ladder(policy, failure.cause) + ("" if failure.cause is FailureClass.STATE else said)
    if view.gone and _climb(policy, FailureClass.NODE, "none") is Action.FAIL:
        return _ladder(policy, FailureClass.NODE)
    return None


def _climb(policy: Policy, cause: FailureClass, shadow: ShadowState) -> Action:
    """The first rung that is possible: where memory is lost only its replacement, elsewhere only a process is."""
    if cause in (FailureClass.NODE, FailureClass.STATE):
        possible = {Action.REPLACE, Action.FAIL}
    else:
        possible = {Action.RESPAWN, Action.FAIL} | ({Action.PROMOTE} if shadow == "ready" else set())
    return next(action for action in policy.classes[cause] if action in possible)


def _ladder(policy: Policy, cause: FailureClass) -> str:
    return f"classes.{cause} is [{', '.join(policy.classes[cause])}]"


def _without_spare(policy: Policy, view: JobView, missing: list[int], who: str) -> Decision:
    """Wait for a spare, or the end of the wait."""
    limit = policy.deadlines.replace
    needed = ", ".join(f"{view.nodes[i].node_id} with {view.nodes[i].slots} slots" for i in missing)
    if view.waited < limit:
        return Decision("wait", (), f"{who}; waiting at most {limit:g} s (deadlines.replace) for a spare for {needed}")
    return Decision("fail", (), f"{who}; no spare for {needed} came within {limit:g} s (deadlines.replace)")
