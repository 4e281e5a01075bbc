"""The policy of a job: the one object that every deadline, limit and ladder of the code is taken from.

It is frozen, travels as msgpack (`encode`, `decode`), and cannot be built with values that contradict each other.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from leto_elastic.errors import ConfigError


class FailureClass(enum.StrEnum):
    """What ended a worker; `node`: its node is gone, `state`: its memory is damaged while the node lives."""

    EXIT = "exit"
    SIGNAL = "signal"
    EXCEPTION = "exception"
    OOM = "oom"
    HANG = "hang"
    NODE = "node"
    STATE = "state"


class Action(enum.StrEnum):
    """A rung of a ladder."""

    RETRY = "retry"
    PROMOTE = "promote"
    RESPAWN = "respawn"
    REPLACE = "replace"
    FAIL = "fail"


class PolicyError(ConfigError):
    """Values of a policy that contradict each other; `keys` are the ones concerned (dotted, from their section on)."""

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys


Seconds = Annotated[float, Meta(gt=0, le=604800, description="a number of seconds above 0, at most 604800 (a week)")]
Ladder = Annotated[
    tuple[Action, ...],
    Meta(
        min_length=1,
        description="a list of different actions out of retry, promote, respawn, replace and fail, that ends with fail",
    ),
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
    connect: Seconds = 5.0
    respawn: Seconds = 120.0
    meet: Seconds = 600.0
    replace: Seconds = 600.0
    restore: Seconds = 300.0
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

    def until_plan(self, *, several: bool) -> float:
        """The longest that a survivor may wait for a plan that it can join, in a job of several nodes or of one: a
        process may have to be started, a spare to come and to be filled.
        """
        return self.plan + self.respawn + (self.replace + self.restore if several else 0.0)


_ORDER = (
    ("abort", "plan", "a blocked rank wakes up before it waits for the plan"),
    ("plan", "collective", "a collective must outlast a recovery elsewhere"),
    ("rebuild", "collective", "a collective must outlast a recovery elsewhere"),
    ("attach", "collective", "a collective must outlast a recovery elsewhere"),
    ("respawn", "collective", "a collective must outlast a recovery elsewhere"),
    ("replace", "collective", "a collective must outlast a recovery elsewhere"),
    ("restore", "collective", "a collective must outlast a recovery elsewhere"),
    ("connect", "restore", "keepers connect to each other while state is restored"),
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
    retain: Annotated[Literal["memory", "file"], Meta(description="memory or file")] = "memory"
    dir: Annotated[str, Meta(min_length=1, pattern="^/", description="an absolute path")] = "/dev/shm"  # noqa: S108


class HangPolicy(Section, frozen=True):
    """When a worker that is still there counts as hung."""

    factor: Annotated[float, Meta(ge=2, le=10000, description="a number from 2 to 10000")] = 10.0
    min: Seconds = 60.0
    first: Seconds = 1800.0
    pause: Seconds = 3600.0
    heartbeat: Seconds = 30.0

    def __post_init__(self) -> None:
        for longer in ("first", "pause"):
            if getattr(self, longer) < self.min:
                raise PolicyError(
                    f"hang.{longer} ({getattr(self, longer):g} s) is below hang.min ({self.min:g} s), the limit of any "
                    "other step",
                    longer,
                    "min",
                )


class StepPolicy(Section, frozen=True):
    """What becomes of a step that fails by itself."""

    skip: Annotated[bool, Meta(description="true or false")] = False
    nonfinite: Annotated[Literal["allow", "skip", "fail"], Meta(description="allow, skip or fail")] = "allow"


class LocalProtection(Section, frozen=True):
    """Parity over the ranks of one node, kept by its agent."""

    parity: Annotated[int, Meta(ge=0, le=1, description="0 (off) or 1")] = 0


class GlobalProtection(Section, frozen=True):
    """RS(data, parity) stripes over the nodes; `parity` 0: off; `data` 0: as many as there are nodes for."""

    data: Annotated[int, Meta(ge=0, le=128, description="a whole number from 0 (as many as fit) to 128")] = 0
    parity: Annotated[int, Meta(ge=0, le=16, description="a whole number from 0 (off) to 16")] = 1
    every: Annotated[int, Meta(ge=1, le=1000000, description="a whole number of steps, at least 1")] = 10
    buffers: Annotated[int, Meta(ge=1, le=2, description="1 or 2")] = 1


class Protection(Section, frozen=True, rename={"global_": "global"}):
    """What survives the loss of memory."""

    local: LocalProtection = LocalProtection()
    global_: GlobalProtection = GlobalProtection()
    codec: Annotated[
        Literal["auto", "isal", "tables", "reedsolo"], Meta(description="auto, isal, tables or reedsolo")
    ] = "auto"
    max_fraction: Annotated[float, Meta(gt=0, le=1, description="a number above 0, at most 1")] = 0.5


class CoordinatorPolicy(Section, frozen=True):
    """Membership and plans in etcd; `lease` in whole seconds."""

    lease: Annotated[int, Meta(ge=2, le=3600, description="a whole number of seconds from 2 to 3600")] = 5
    collect_ms: Annotated[float, Meta(ge=0, le=1000, description="a number of milliseconds from 0 to 1000")] = 2.0


_LADDER = (Action.PROMOTE, Action.RESPAWN, Action.FAIL)


def _default_classes() -> dict[FailureClass, tuple[Action, ...]]:
    lost = dict.fromkeys((FailureClass.NODE, FailureClass.STATE), (Action.REPLACE, Action.FAIL))
    return {**dict.fromkeys(FailureClass, _LADDER), **lost}


class Policy(Section, frozen=True):
    """All that may be tuned about a job's recovery. Raises `PolicyError` when values contradict each other.

    The defaults here equal `configs/default.yaml`.
    """

    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    classes: dict[FailureClass, Ladder] = msgspec.field(default_factory=_default_classes)
    shadow: ShadowPolicy = ShadowPolicy()
    state: StatePolicy = StatePolicy()
    step: StepPolicy = StepPolicy()
    hang: HangPolicy = HangPolicy()
    protect: Protection = Protection()
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
        if self.coordinator.lease >= self.deadlines.plan:
            raise PolicyError(
                f"coordinator.lease ({self.coordinator.lease} s) must be below deadlines.plan "
                f"({self.deadlines.plan:g} s): survivors wait for the plan while a silent node is missed by its lease",
                "coordinator.lease",
                "deadlines.plan",
            )
        self._check_hangs()

    def _check_hangs(self) -> None:
        """Who waits in a collective for a rank that hangs must not be the one that fails."""
        collective, hang = self.deadlines.collective, self.hang
        for key, seconds, within, how in (
            ("min", hang.min, hang.min < collective, "be below"),
            ("first", hang.first, hang.first <= collective, "not be above"),
            ("heartbeat", hang.heartbeat, hang.heartbeat < collective, "be below"),
        ):
            if not within:
                raise PolicyError(
                    f"deadlines out of order: hang.{key} ({seconds:g} s) must {how} deadlines.collective "
                    f"({collective:g} s): a collective must outlast the detection of a hang, or those that wait for "
                    "the hung rank are what fails",
                    f"hang.{key}",
                    "deadlines.collective",
                )

    def encode(self) -> bytes:
        """As msgpack, for another process."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Policy:
        """The policy that `encode` wrote. Raises msgspec.ValidationError for anything else."""
        return msgspec.msgpack.decode(data, type=cls)
