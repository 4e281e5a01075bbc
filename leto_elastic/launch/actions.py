"""What the job's state machine asks its shell to do. Pure records; `Supervisor` carries them out in order."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from leto_elastic import wire
from leto_elastic.recovery.policy import FailureClass

Kind = Literal["trainer", "shadow", "respawn"]
"""What a process is started as. A `respawn` is a shadow in a hurry: not niced, promoted as soon as it is ready."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process for a slot."""

    slot: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a process, with descriptors that stay ours."""

    key: int
    message: wire.FromAgent
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HandOver:
    """Make a parked process the trainer of its slot: as `Send`, with the slot's stdout and stderr; not niced."""

    key: int
    message: wire.Promote


@dataclass(frozen=True, slots=True)
class Warn:
    """The trainer of a parked shadow is dead: take its niceness away and have it read the state."""

    key: int


@dataclass(frozen=True, slots=True)
class Hurry:
    """A shadow that was still starting is needed now: take its niceness away and start its `respawn` deadline."""

    key: int


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL a process."""

    key: int


@dataclass(frozen=True, slots=True)
class Death:
    """A failure of a rank; `detail` is for a human.

    `held`: its process is alive and holds an exception; `digest`: of an exception, equal for equal ones.
    """

    rank: int
    slot: int
    pid: int
    code: int
    cause: FailureClass
    step: int
    phase: str
    chunk: int
    detail: str = ""
    held: bool = False
    digest: str = ""

    @property
    def told(self) -> str:
        """For a human."""
        what = "raised" if self.held else f"ended ({how(self.code)})"
        return f"rank {self.rank} {what}" + (f": {self.detail}" if self.detail else "")

    def fields(self) -> dict[str, object]:
        """For the event."""
        return {**asdict(self), "cause": str(self.cause)}


def how(code: int) -> str:
    """An exit code, or minus a signal's number, for a human."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


@dataclass(frozen=True, slots=True)
class Report:
    """Write a failure record for `epoch`."""

    epoch: int
    death: Death


@dataclass(frozen=True, slots=True)
class Surrender:
    """Have a process end by the exception that it holds, within the shutdown deadline."""

    key: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer the Hello of a process that had to wait until its slot had a rank."""

    key: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Fetch what the keepers have of a slot that was on a lost node; `Job.recalled` follows."""

    slot: int


@dataclass(frozen=True, slots=True)
class Stand:
    """Nothing on this node moves: say so for `epoch`, bring the state to what follows; `Job.restored` follows."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the other nodes that this one has come to a stage on the way into `epoch`."""

    epoch: int
    stage: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Write a slot's record."""

    slot: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Write an event, and its line on the terminal when it has one."""

    event: str
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settled:
    """Every rank committed in `epoch`: what was kept for earlier epochs and their failures can go."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Stop the whole group and start it again."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The job is over; `reason` is None when it succeeded."""

    reason: str | None


Action = (
    Spawn
    | Send
    | HandOver
    | Warn
    | Hurry
    | Kill
    | Surrender
    | Report
    | Welcome
    | Recall
    | Stand
    | Say
    | Publish
    | Emit
    | Settled
    | Restart
    | End
)
