"""The key schema and the records of a job in etcd; nothing else builds or reads keys.

    /leto/<run id>/run               RunRecord      which agent began the run, and how it ended
    /leto/<run id>/start             PlanRecord     epoch 0: who takes part
    /leto/<run id>/secret            32 bytes, hex  create-once: by which the job's keepers know each other
    /leto/<run id>/epoch             a number       the current epoch
    /leto/<run id>/leader            a node id      bound to the leader's lease
    /leto/<run id>/budget            BudgetRecord   recoveries and restarts used; only ever grows
    /leto/<run id>/nodes/<node id>   NodeRecord     bound to the node's lease
    /leto/<run id>/slots/<slot>      SlotRecord     the trainer and the shadow of a slot
    /leto/<run id>/failures/<e>/<r>  FailureRecord  create-once: how rank r ended epoch e
    /leto/<run id>/plans/<e>         PlanRecord     create-once: how epoch e comes about, e >= 1
    /leto/<run id>/meet/<e>/<s>/<p>  bytes          what the node at position p says at stage s of epoch e
    /leto/<run id>/shards/<slot>     ShardRecord    the protected versions of a slot, and who holds their pieces

Run ids are percent-quoted, numbers zero-padded so that keys sort like numbers. Values are JSON, so that
`etcdctl get --prefix /leto/` can be read by a person. Every record carries the version `v` of its layout.
"""

from __future__ import annotations

from typing import Literal, TypeVar
from urllib.parse import quote, unquote

import msgspec

from leto_elastic.errors import LetoError
from leto_elastic.recovery.ladder import Repair, ShadowState
from leto_elastic.recovery.policy import FailureClass

SCHEMA_VERSION = 1

ROOT = "/leto/"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records."""

    v: int = SCHEMA_VERSION


class RunRecord(Record, frozen=True, kw_only=True):
    """The agent that began a run; `started` in unix seconds, `reason` of a failure."""

    owner: str
    started: float
    state: Literal["running", "succeeded", "failed"] = "running"
    reason: str = ""


class NodeRecord(Record, frozen=True, kw_only=True):
    """A live agent.

    Args:
        host, pid: of its process.
        slots: workers that it can run.
        address: at which the other nodes reach its workers and its keeper.
        keeper: port of its keeper, 0 for none.
        domain: what fails together with it; "": nothing else.
    """

    host: str
    pid: int
    slots: int
    address: str = "127.0.0.1"
    keeper: int = 0
    domain: str = ""


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A place among the nodes of a job, and the agent that has it.

    `domain` is that of the agent, `place` that of the first one that had the place: stripes are laid out by it, so that
    a node of another domain moves only what was at the lost one.
    """

    node: str
    slots: int
    host: str = ""
    address: str = "127.0.0.1"
    keeper: int = 0
    domain: str = ""
    place: str = ""

    @classmethod
    def of(cls, node: str, record: NodeRecord, place: str = "") -> Seat:
        """The seat of an agent."""
        return cls(
            node=node,
            slots=record.slots,
            host=record.host,
            address=record.address,
            keeper=record.keeper,
            domain=record.domain or node,
            place=place or record.domain or node,
        )


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
    """How a trainer ended, and where its header stood (`step`, `phase`, `chunk`); `time` in unix seconds.

    `detail`: what is known beyond that, for a human. `held`: the process is alive and holds the exception, whose
    `digest` is the same for the same error.
    """

    rank: int
    slot: int
    pid: int
    cause: FailureClass
    step: int
    phase: str = ""
    chunk: int = 0
    time: float = 0.0
    detail: str = ""
    held: bool = False
    digest: str = ""


class PlanRecord(Record, frozen=True, kw_only=True):
    """The decision that makes `epoch`.

    Args:
        epoch: the epoch to join.
        action: repair in place, restart the whole group, or fail; start of the run; finish: the training is over, so
            nobody builds another epoch.
        repairs: for `repair`, who gets a new process and how.
        store_host, store_port: the c10d TCPStore of the epoch; port 0 for `fail` and `finish`.
        reason: for a human.
        failures: every failure that was accepted in epoch-1.
        step: the step that the job stood at.
        time: unix seconds.
        nodes: who takes part, by position.
        count: of the failures, as limits count them.
        generation: the newest epoch in which memory was lost, see `leto_elastic.state.header.tag_of`.
        skip: the step that ranks which still stand at it step over; -1: none.
    """

    epoch: int
    action: Literal["start", "repair", "restart", "finish", "fail"]
    repairs: tuple[Repair, ...]
    store_host: str
    store_port: int
    reason: str
    failures: tuple[FailureRecord, ...]
    step: int
    time: float
    nodes: tuple[Seat, ...] = ()
    generation: int = 0
    count: int = 0
    skip: int = -1


class ShardRecord(Record, frozen=True, kw_only=True):
    """The protected state of a slot.

    Args:
        rank: of its trainer.
        version: newest version whose pieces are all where they belong; -1: none yet.
        generation: in which it was written.
        bytes: of the state; `chunks` of it are coded one by one.
        digest: of the manifest.
        holders: positions of the nodes that hold its parity, or copies of it.
        state: writing (the first version), complete, repairing (pieces were lost and are being restored).
        lag: steps by which the newest version is older than the policy asks for.
    """

    rank: int
    version: int
    generation: int
    bytes: int
    chunks: int
    digest: str
    holders: tuple[int, ...]
    state: Literal["writing", "complete", "repairing"]
    lag: int = 0


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
        self.start = f"{self.root}start"
        self.secret = f"{self.root}secret"
        self.epoch = f"{self.root}epoch"
        self.leader = f"{self.root}leader"
        self.budget = f"{self.root}budget"
        self.nodes = f"{self.root}nodes/"
        self.slots = f"{self.root}slots/"
        self.failures = f"{self.root}failures/"
        self.plans = f"{self.root}plans/"
        self.meetings = f"{self.root}meet/"
        self.shards = f"{self.root}shards/"

    def node(self, node_id: str) -> str:
        """Key of a node."""
        return self.nodes + quote(node_id, safe="")

    def node_of(self, key: str) -> str:
        """The node of a key that `node` made."""
        return unquote(key.removeprefix(self.nodes))

    def meeting_of(self, epoch: int) -> str:
        """Prefix of what is said on the way into an epoch."""
        return f"{self.meetings}{epoch:08d}/"

    def meeting(self, epoch: int, stage: str, position: int) -> str:
        """Key of what one node says."""
        return f"{self.meeting_of(epoch)}{stage}/{position:06d}"

    def shard(self, slot: int) -> str:
        """Key of a slot's protected state."""
        return f"{self.shards}{slot:06d}"

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
