"""The words between the supervisor and torchrun's side of the agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from leto_elastic import wire
from leto_elastic.launch.logs import Logs
from leto_elastic.launch.setup import Entry
from leto_elastic.launch.world import World
from leto_elastic.recovery.policy import Policy


class Host(Protocol):
    """What the supervisor needs of torchrun's side of the agent."""

    def worker_env(self, local_rank: int, attempt: int, store: wire.StoreAddress, world: World) -> dict[str, str]:
        """Environment of a worker as torchrun makes it, without what is inherited (a spare's knows no rank)."""
        ...

    def make_logs(self, envs: dict[int, dict[str, str]]) -> Logs:
        """Destinations of the output of one start of the group; adds to the environments."""
        ...

    def group_starting(self, attempt: int, world: World) -> None:
        """The group is about to be started, for the `attempt`-th time after the first."""
        ...

    def trainer_started(self, local_rank: int, pid: int) -> None:
        """A process trains a rank now: it was started for it, or promoted."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """A job's constants on this node.

    Args:
        run_id: `--rdzv-id`.
        run_dir: of the job; `logs`, where the output of shadows goes, is this node's own.
        slots: workers of this node.
        entry: the user's program.
        policy: deadlines and limits.
        max_restarts: of the whole group.
        shutdown: seconds between SIGTERM and SIGKILL.
        address: at which other nodes reach this one.
    """

    run_id: str
    run_dir: str
    slots: int
    entry: Entry
    policy: Policy
    max_restarts: int
    shutdown: float
    logs: str
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: `reason` None when it succeeded, else why, and the failures in the order they were seen."""

    reason: str | None
    failures: dict[int, ProcessFailure]


class Interrupted(Exception):
    """A death signal ended the job."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number
