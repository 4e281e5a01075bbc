"""Random faults, and when they strike: the pure half of a chaos campaign.

`schedule` makes of a seed and a topology a list of faults that the job must survive. The same seed makes the same list,
on every machine, so a run that failed can be told by one line (`written`, `parse`) and run again. What cannot be known
beforehand is left to who executes it (`leto_elastic.testing.strikes`): which processes there are then, and how long
redundancy takes to come back. A loss of a node therefore waits until what was lost before is protected again.

`why_not_survivable` says what is wrong with a list; `schedule` makes none that it objects to.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from leto_elastic.errors import ConfigError

Kind = Literal[
    "kill",
    "term",
    "segv",
    "abrt",
    "several",
    "shadow",
    "both",
    "stop",
    "zygote",
    "agent_stop",
    "agent_freeze",
    "agent_kill",
    "node",
    "leader",
    "etcd_pause",
    "etcd_kill",
    "link",
    "cut",
    "last",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

MEANING: dict[str, str] = {
    "kill": "SIGKILL of a trainer",
    "term": "SIGTERM of a trainer",
    "segv": "SIGSEGV of a trainer",
    "abrt": "SIGABRT of a trainer",
    "several": "SIGKILL of several trainers at once",
    "shadow": "SIGKILL of a shadow",
    "both": "SIGKILL of a trainer and its shadow",
    "stop": "SIGSTOP of a trainer, SIGCONT later",
    "zygote": "SIGKILL of an agent's zygote",
    "agent_stop": "SIGSTOP of an agent for less than its lease",
    "agent_freeze": "SIGSTOP of an agent for longer than its lease",
    "agent_kill": "SIGKILL of an agent alone",
    "node": "SIGKILL of all processes of a node",
    "leader": "the same of the leader's node",
    "etcd_pause": "SIGSTOP of etcd, SIGCONT later",
    "etcd_kill": "SIGKILL of etcd, started again later",
    "link": "a node's link down for less than its lease",
    "cut": "a node's link down for longer than its lease",
    "last": "SIGKILL of a trainer at the end of the job",
}
"""Of each kind, for humans."""

LOSSES = frozenset({"agent_freeze", "agent_kill", "node", "leader", "cut"})
"""Kinds that lose the memory of a node, in a job of several."""

DEADLY = frozenset({"kill", "term", "segv", "abrt", "several", "both"})
"""Kinds that end trainers and no node."""

_OF_SEVERAL = frozenset({"agent_kill", "node", "leader"})
_OF_HOSTS = frozenset({"link", "cut"})
_ETCD = frozenset({"etcd_pause", "etcd_kill"})

_WEIGHTS: dict[str, float] = {
    "kill": 6.0, "term": 2.0, "segv": 2.0, "abrt": 2.0, "several": 3.0, "shadow": 3.0, "both": 1.5, "stop": 2.0,
    "zygote": 0.8, "agent_stop": 1.0, "agent_freeze": 0.5, "agent_kill": 1.5, "node": 2.5, "leader": 2.0,
    "etcd_pause": 1.0, "etcd_kill": 0.6, "link": 1.0, "cut": 1.5,
}  # fmt: skip

_STEADY = 10.0
"""Seconds between two kills of etcd: an embedded one that never stays up so long is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What a job under test is made of.

    Args:
        nodes: that train.
        per_node: workers of each.
        parity: nodes that may be lost at once; 0 in a job of one node.
        lease: seconds until a silent agent counts as gone.
        hosts: the nodes have links of their own.
        etcd_limit: seconds that etcd may be away for.
    """

    nodes: int = 1
    per_node: int = 4
    parity: int = 0
    lease: float = 2.0
    hosts: bool = False
    etcd_limit: float = 4.0

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.per_node

    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of faults that make sense here and are survived."""
        return tuple(kind for kind in KINDS if self._possible(kind))

    def _possible(self, kind: Kind) -> bool:
        if kind == "last" or (kind in _OF_HOSTS and not self.hosts):  # "last" is not at an instant of the schedule's
            return False
        return kind not in _OF_SEVERAL | {"cut"} or (self.nodes > 1 and self.parity > 0)

    def loses(self, kind: str) -> bool:
        """Whether a fault of this kind loses the memory of a node."""
        return self.nodes > 1 and kind in LOSSES

    def holds(self, kind: str) -> tuple[float, float] | None:
        """Shortest and longest time in seconds that a fault of this kind lasts; None for one without end.

        For a node that is killed: until one is started in its place.
        """
        match kind:
            case "stop":
                return 0.05, 2.0
            case "agent_stop" | "link":
                return 0.05, 0.4 * self.lease
            case "agent_freeze" | "cut":
                return 1.5 * self.lease, 3.0 * self.lease
            case "agent_kill" | "node" | "leader":
                return 0.0, 3.0
            case "etcd_pause" | "etcd_kill":
                return 0.1, self.etcd_limit
            case _:
                return None


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        at: seconds since the job is ready for faults (all shadows are, and every rank has committed).
        kind: of the fault.
        pick: chooses the target among those that there are then: their number `pick % count`.
        count: trainers hit at once, for "several".
        hold: seconds until it is undone, see `Topology.holds`.
    """

    at: float
    kind: Kind
    pick: int = 0
    count: int = 1
    hold: float = 0.0


def run_seed(seed: int, index: int) -> str:
    """The seed of run `index` of a campaign."""
    return f"{seed}/{index}"


def schedule(
    seed: int | str, topology: Topology, *, count: int, gap: float, kinds: Sequence[Kind] | None = None
) -> list[Fault]:
    """`count` faults, by time.

    Args:
        seed: of the random numbers.
        topology: of the job.
        count: of faults.
        gap: mean seconds between two (exponentially distributed, so some come in groups).
        kinds: choose from these; None: all that are possible.

    Raises ValueError when a kind is not possible in this topology.
    """
    rng = random.Random(f"chaos {seed}")
    allowed = list(kinds) if kinds is not None else list(topology.kinds())
    if impossible := sorted(set(allowed) - set(topology.kinds())):
        raise ValueError(f"not possible (or not survived) here: {', '.join(impossible)}")
    faults: list[Fault] = []
    at, etcd_free = 0.0, 0.0
    for _ in range(count):
        at += rng.expovariate(1.0 / gap)
        now = round(at, 3)
        candidates = [kind for kind in allowed if kind not in _ETCD or now >= etcd_free]
        if not candidates:
            at = etcd_free
            now, candidates = round(at, 3), allowed
        (kind,) = rng.choices(candidates, weights=[_WEIGHTS[kind] for kind in candidates])
        limits = topology.holds(kind)
        hold = 0.0 if limits is None else round(rng.uniform(*limits), 3)
        hit = rng.randint(2, topology.ranks) if kind == "several" else 1
        faults.append(Fault(now, kind, rng.randrange(1000), hit, hold))
        if kind in _ETCD:
            etcd_free = round(now + hold + _STEADY, 3)
    assert not why_not_survivable(faults, topology)
    return faults


def why_not_survivable(faults: Iterable[Fault], topology: Topology) -> list[str]:
    """What is asked of a job of this topology that it need not survive; empty when there is nothing.

    One thing is not decided here: losses of nodes may follow each other at any pace, because each waits until it is
    survivable.
    """
    found: list[str] = []
    last, etcd_free = 0.0, 0.0
    for number, fault in enumerate(faults):
        name = f"fault {number + 1} ({fault.kind})"
        if fault.at < last:
            found.append(f"{name} comes before the one that it follows, or before the job is ready")
        last = fault.at
        if fault.kind not in topology.kinds():
            found.append(
                f"{name}: nothing of that kind is survived by {topology.nodes} nodes, parity {topology.parity}"
            )
        if not 1 <= fault.count <= topology.ranks:
            found.append(f"{name} hits {fault.count} of {topology.ranks} trainers")
        limits = topology.holds(fault.kind)
        if limits is not None and not limits[0] <= fault.hold <= limits[1]:
            found.append(f"{name} lasts {fault.hold:g} s, allowed are {limits[0]:g} to {limits[1]:g}")
        if fault.kind in _ETCD:
            if fault.at < etcd_free:
                found.append(f"{name}: etcd was away less than {_STEADY:g} s before")
            etcd_free = round(fault.at + fault.hold + _STEADY, 3)
    return found


def written(faults: Iterable[Fault]) -> str:
    """As text, for `parse`."""
    return "; ".join(f"{f.at:g} {f.kind} pick={f.pick} count={f.count} hold={f.hold:g}" for f in faults)


def parse(text: str) -> list[Fault]:
    """The faults that `written` wrote. Raises ConfigError for anything else."""
    return [_fault(entry) for entry in (part.strip() for part in text.split(";")) if entry]


def _fault(entry: str) -> Fault:
    try:
        at, kind, *pairs = entry.split()
        values = dict(pair.split("=") for pair in pairs)
        found: Kind = next(known for known in KINDS if known == kind)
        fault = Fault(
            float(at), found, int(values.pop("pick", 0)), int(values.pop("count", 1)), float(values.pop("hold", 0.0))
        )
    except (ValueError, StopIteration):
        raise ConfigError(
            f"{entry!r} is not SECONDS KIND pick=N count=N hold=SECONDS, kinds are {', '.join(KINDS)}"
        ) from None
    if values:
        raise ConfigError(f"{entry!r}: there is no {', '.join(values)}")
    return fault
