"""The key schema and the records of a job in etcd; nothing else builds or reads keys.

    /leto/<run id>/run               RunRecord      which agent owns the run, and how it ended
    /leto/<run id>/epoch             a number       the current epoch
    /leto/<run id>/leader            a node id      bound to the leader's lease
    /leto/<run id>/budget            BudgetRecord   recoveries and restarts used; only ever grows
    /leto/<run id>/nodes/<node id>   NodeRecord     bound to the node's lease
    /leto/<run id>/slots/<slot>      SlotRecord     the trainer and the shadow of a slot
    /leto/<run id>/failures/<e>/<r>  FailureRecord  create-once: how rank r ended epoch e
    /leto/<run id>/plans/<e>         PlanRecord     create-once: how epoch e comes about, e >= 1

Run ids are percent-quoted, numbers zero-padded so that keys sort like numbers. Values are JSON, so that
`etcdctl get --prefix /leto/` can be read by a person. Every record carries the version `v` of its layout.
"""

from __future__ import annotations

from typing import Literal, TypeVar
from urllib.parse import quote

import msgspec

from leto_elastic.errors import LetoError
from leto_elastic.recovery.policy import FailureClass, Repair, ShadowState

SCHEMA_VERSION = 1

ROOT = "/leto/"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records."""

    v: int = SCHEMA_VERSION


class RunRecord(Record, frozen=True, kw_only=True):
    """The agent that owns a run; `started` in unix seconds."""

    owner: str
    started: float
    state: Literal["running", "succeeded", "failed"] = "running"


class NodeRecord(Record, frozen=True, kw_only=True):
    """A live agent: its host, its pid, and how many slots it has."""

    host: str
    pid: int
    slots: int


class SlotRecord(Record, frozen=True, kw_only=True):
    """A slot as its agent sees it.

    Args:
        rank: rank of its trainer.
        pid: pid of its trainer.
        leto: the trainer called `leto.init()`.
        protected: the trainer's state is in segments, after its first commit.
        shadow: how far the slot's shadow is.
        finished: the trainer has committed the last step.
    """

    rank: int
    pid: int
    leto: bool = False
    protected: bool = False
    shadow: ShadowState = "none"
    finished: bool = False


class FailureRecord(Record, frozen=True, kw_only=True):
    """How a trainer ended, and where its header stood (`step`, `phase`, `chunk`); `time` in unix seconds."""

    rank: int
    slot: int
    pid: int
    cause: FailureClass
    step: int
    phase: str = ""
    chunk: int = 0
    time: float = 0.0


class PlanRecord(Record, frozen=True, kw_only=True):
    """The decision that makes `epoch`.

    Args:
        epoch: the epoch to join.
        action: repair in place, restart the whole group, or fail.
        repairs: for `repair`, who gets a new process and how.
        store_host, store_port: the c10d TCPStore of the epoch; port 0 for `fail`.
        reason: for a human.
        failures: every failure that was accepted in epoch-1.
        step: the step that the job stood at.
        time: unix seconds.
    """

    epoch: int
    action: Literal["repair", "restart", "fail"]
    repairs: tuple[Repair, ...]
    store_host: str
    store_port: int
    reason: str
    failures: tuple[FailureRecord, ...]
    step: int
    time: float


class BudgetRecord(Record, frozen=True, kw_only=True):
    """What a run has used up."""

    recoveries: int = 0
    restarts: int = 0


AnyRecord = TypeVar("AnyRecord", bound=Record)


def encode(record: Record) -> bytes:
    """A record as JSON."""
    return msgspec.json.encode(record)


def decode(key: str, value: bytes, kind: type[AnyRecord]) -> AnyRecord:
    """The record of a key. Raises LetoError when it is not one of this version."""
    try:
        version = msgspec.json.decode(value, type=Record).v
        if version != SCHEMA_VERSION:
            raise LetoError(
                f"etcd key {key} has layout version {version}, this leto_elastic knows {SCHEMA_VERSION}: "
                "use the same version on all nodes, or another run id"
            )
        return msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError as error:
        raise LetoError(f"etcd key {key} holds no {kind.__name__}: {error}") from error


class Keys:
    """The keys of one run."""

    def __init__(self, run_id: str) -> None:
        self.root = f"{ROOT}{quote(run_id, safe='')}/"
        self.run = f"{self.root}run"
        self.epoch = f"{self.root}epoch"
        self.leader = f"{self.root}leader"
        self.budget = f"{self.root}budget"
        self.nodes = f"{self.root}nodes/"
        self.slots = f"{self.root}slots/"
        self.failures = f"{self.root}failures/"
        self.plans = f"{self.root}plans/"

    def node(self, node_id: str) -> str:
        """Key of a node."""
        return self.nodes + quote(node_id, safe="")

    def slot(self, slot: int) -> str:
        """Key of a slot."""
        return f"{self.slots}{slot:06d}"

    def failures_of(self, epoch: int) -> str:
        """Prefix of the failures that ended an epoch."""
        return f"{self.failures}{epoch:08d}/"

    def failure(self, epoch: int, rank: int) -> str:
        """Key of the failure of a rank."""
        return f"{self.failures_of(epoch)}{rank:06d}"

    def plan(self, epoch: int) -> str:
        """Key of the plan that makes an epoch."""
        return f"{self.plans}{epoch:08d}"
