"""The policy of a job, and the pure function that turns a failure into a decision.

`Policy` is the one object that every deadline, limit and ladder of the code is taken from. It is frozen, travels as
msgpack (`encode`, `decode`), and cannot be built with values that contradict each other. `decide` sees nothing but its
argument: no clock, no socket. The leader calls it, and whoever leads next comes to the same decision from the same
records.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from leto_elastic.errors import ConfigError


class FailureClass(enum.StrEnum):
    """What ended a worker."""

    EXIT = "exit"
    SIGNAL = "signal"
    EXCEPTION = "exception"


class Action(enum.StrEnum):
    """A rung of a ladder."""

    PROMOTE = "promote"
    RESPAWN = "respawn"
    FAIL = "fail"


class PolicyError(ConfigError):
    """Values of a policy that contradict each other; `keys` are the ones concerned (dotted, from their section on)."""

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys


Seconds = Annotated[float, Meta(gt=0, le=604800, description="a number of seconds above 0, at most 604800 (a week)")]
Ladder = Annotated[
    tuple[Action, ...],
    Meta(min_length=1, description="a list of different actions out of promote, respawn and fail, that ends with fail"),
]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a part of the policy: keys are checked, values cannot change."""


class Deadlines(Section, frozen=True):
    """The longest waits, in seconds; `configs/default.yaml` says what each one is for."""

    start: Seconds = 120.0
    etcd_start: Seconds = 5.0
    etcd: Seconds = 8.0
    abort: Seconds = 5.0
    plan: Seconds = 30.0
    rebuild: Seconds = 30.0
    attach: Seconds = 30.0
    respawn: Seconds = 120.0
    rehearse: Seconds = 300.0
    collective: Seconds = 1800.0
    shutdown: Seconds = 30.0

    def __post_init__(self) -> None:
        for shorter, longer, why in _ORDER:
            if getattr(self, shorter) >= getattr(self, longer):
                values = (
                    f"{shorter} ({getattr(self, shorter):g} s) must be below {longer} ({getattr(self, longer):g} s)"
                )
                raise PolicyError(f"deadlines out of order: {values}: {why}", shorter, longer)


_ORDER = (
    ("abort", "plan", "a blocked rank wakes up before it waits for the plan"),
    ("plan", "collective", "a collective must outlast a recovery elsewhere"),
    ("rebuild", "collective", "a collective must outlast a recovery elsewhere"),
    ("attach", "collective", "a collective must outlast a recovery elsewhere"),
    ("respawn", "collective", "a collective must outlast a recovery elsewhere"),
)


class Window(Section, frozen=True):
    """At most `failures` within `seconds`."""

    failures: Annotated[int, Meta(ge=1, description="a whole number, at least 1")] = 60
    seconds: Seconds = 60.0


class Limits(Section, frozen=True):
    """When repairing in place stops being reasonable."""

    per_step: Annotated[int, Meta(ge=1, description="a whole number, at least 1")] = 3
    per_window: Window = Window()
    per_job: Annotated[int, Meta(ge=0, description="a whole number, at least 0")] = 1000


class ShadowPolicy(Section, frozen=True):
    """Standby processes: how many, how prepared, and when memory is too short for them."""

    per_slot: Annotated[int, Meta(ge=0, le=1, description="0 or 1")] = 1
    rehearsals: Annotated[int, Meta(ge=3, le=1000, description="a whole number from 3 to 1000")] = 3
    nice: Annotated[int, Meta(ge=0, le=19, description="a whole number from 0 to 19")] = 19
    min_free_fraction: Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")] = 0.05
    max_pressure: Annotated[float, Meta(gt=0, le=100, description="a percentage above 0, at most 100")] = 20.0
    retry_after: Seconds = 5.0


class StatePolicy(Section, frozen=True):
    """The training state in shared memory."""

    chunk_bytes: Annotated[
        int, Meta(ge=65536, le=1 << 40, description="a whole number of bytes from 65536 to 1099511627776")
    ] = 1048576


class CoordinatorPolicy(Section, frozen=True):
    """Membership and plans in etcd; `lease` in whole seconds."""

    lease: Annotated[int, Meta(ge=2, le=3600, description="a whole number of seconds from 2 to 3600")] = 5
    collect_ms: Annotated[float, Meta(ge=0, le=1000, description="a number of milliseconds from 0 to 1000")] = 2.0


_LADDER = (Action.PROMOTE, Action.RESPAWN, Action.FAIL)


def _default_classes() -> dict[FailureClass, tuple[Action, ...]]:
    return dict.fromkeys(FailureClass, _LADDER)


class Policy(Section, frozen=True):
    """All that may be tuned about a job's recovery. Raises `PolicyError` when values contradict each other.

    The defaults here equal `configs/default.yaml`.
    """

    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    classes: dict[FailureClass, Ladder] = msgspec.field(default_factory=_default_classes)
    shadow: ShadowPolicy = ShadowPolicy()
    state: StatePolicy = StatePolicy()
    coordinator: CoordinatorPolicy = CoordinatorPolicy()

    def __post_init__(self) -> None:
        for name in FailureClass:
            if name not in self.classes:
                raise PolicyError(f"classes has no ladder for the failure class {name}", "classes")
        for name, ladder in self.classes.items():
            if ladder[-1] is not Action.FAIL or len(set(ladder)) != len(ladder):
                raise PolicyError(
                    f"classes.{name} is [{', '.join(ladder)}], but a ladder has each action once and ends with fail",
                    f"classes.{name}",
                )
        if self.coordinator.collect_ms / 1000 >= self.deadlines.plan:
            raise PolicyError(
                f"coordinator.collect_ms ({self.coordinator.collect_ms:g} ms) must be below deadlines.plan "
                f"({self.deadlines.plan:g} s): survivors wait for the plan while failures are collected",
                "coordinator.collect_ms",
                "deadlines.plan",
            )

    def encode(self) -> bytes:
        """As msgpack, for another process."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Policy:
        """The policy that `encode` wrote. Raises msgspec.ValidationError for anything else."""
        return msgspec.msgpack.decode(data, type=cls)


# ---- what the leader knows when it decides


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
        failures: at least one.
        shadows: state of the shadow of each slot; a slot that is missing has none.
        protected: every slot's state is in segments of its agent (so it outlives any worker).
        leto_job: some worker called `leto.init()`.
        finished: some worker has finished the training and left it, so it cannot come back to join an epoch.
        history: the plans to repair made so far.
        now: same clock as `PastRecovery.time`, seconds.
        restarts_left: whole-group restarts left (`--max-restarts`).
        budget: recoveries left to the job (`limits.per_job`).
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


class Repair(msgspec.Struct, frozen=True):
    """How one failed rank gets a process again."""

    rank: int
    slot: int
    action: Literal["promote", "respawn"]


class Decision(msgspec.Struct, frozen=True):
    """What to do about a failure: repair in place, restart the whole group, or fail; `reason` is for a human."""

    action: Literal["repair", "restart", "fail"]
    repairs: tuple[Repair, ...]
    reason: str


def decide(policy: Policy, view: JobView) -> Decision:
    """The decision for the failures of one epoch.

    A job that never called `leto.init()` is restarted as a whole, as torchrun does it. Any other is repaired in place,
    unless the training was over, a slot is not protected yet, a limit is reached, or the ladder
    of a failure's class arrives at fail.
    """
    who = _who(view.failures)
    if not view.leto_job:
        if view.restarts_left > 0:
            return Decision("restart", (), f"{who}; whole group, {view.restarts_left} restarts left")
        return Decision("fail", (), f"{who}; no restarts left (--max-restarts)")
    obstacle = _obstacle(policy, view)
    if obstacle is not None:
        return Decision("fail", (), f"{who}; {obstacle}")
    repairs: list[Repair] = []
    for failure in sorted(view.failures, key=lambda f: f.rank):
        match _climb(policy.classes[failure.cause], view.shadows.get(failure.slot, "none")):
            case Action.PROMOTE:
                repairs.append(Repair(failure.rank, failure.slot, "promote"))
            case Action.RESPAWN:
                repairs.append(Repair(failure.rank, failure.slot, "respawn"))
            case _:
                shadow = view.shadows.get(failure.slot, "none")
                ladder = ", ".join(policy.classes[failure.cause])
                why = f"classes.{failure.cause} is [{ladder}] and the shadow of slot {failure.slot} is: {shadow}"
                return Decision("fail", (), f"{who}; {why}")
    return Decision("repair", tuple(repairs), who)


def _who(failures: tuple[Failure, ...]) -> str:
    return ", ".join(f"rank {f.rank} failed ({f.cause})" for f in sorted(failures, key=lambda f: f.rank))


def _obstacle(policy: Policy, view: JobView) -> str | None:
    """Why nothing may be repaired in place at all, or None."""
    limits = policy.limits
    if view.finished:
        return "the training was already finished, so nobody is left to join a new epoch"
    if not view.protected:
        return "not every rank has committed its first step yet, so there is no state to go on from"
    if view.budget <= 0:
        return "no recoveries left (limits.per_job or --max-restarts)"
    same = sum(past.step == view.step_of_failure for past in view.history)
    if same >= limits.per_step:
        return f"step {view.step_of_failure} was recovered {same} times already (limits.per_step)"
    window = limits.per_window
    recent = len(view.failures) + sum(p.failures for p in view.history if p.time > view.now - window.seconds)
    if recent > window.failures:
        return f"{recent} failures within {window.seconds:g} s (limits.per_window allows {window.failures})"
    return None


def _climb(ladder: tuple[Action, ...], shadow: ShadowState) -> Action:
    """The first rung that is possible."""
    return next(action for action in ladder if action is not Action.PROMOTE or shadow == "ready")
