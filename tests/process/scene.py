"""A job of several nodes for the tests: begun, frozen at a known moment, and compared with the undisturbed run.

To strike at a known moment, ranks stop themselves there (fault kind `stop`), the test waits until all threads of all of
them stand, strikes, and lets the others go on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from leto_elastic.testing.cluster import Cluster
from leto_elastic.testing.network import Hosts, Network
from tests.process.etcd_server import Server, server
from tests.process.registry import Registry
from tests.process.runs import TRAIN, Outcome, trainers, wait_stopped

POLICY = Path(__file__).with_name("policy_nodes.yaml")
DAMAGE = Path(__file__).with_name("damage")
STEPS = 16
EVERY = 3
PROTECTED = 6
"""The step that lasts until all shadows are ready, so the version that begins it is protected from then on."""

ARGS = ("--parallel", "fsdp", "--steps", str(STEPS))
PER_NODE = 2


class Scene:
    """A job that has begun: all its ranks run, and so many spares have come."""

    def __init__(self, cluster: Cluster, etcd: Server, world_size: int, spares: int) -> None:
        self.cluster, self.etcd, self.registry, self.world_size = cluster, etcd, Registry(etcd), world_size
        cluster.wait_event("worker_started", role="trainer", count=world_size)
        self.first = trainers(cluster, world_size)
        self._homes = {rank: cluster.node_with(pid) for rank, pid in self.first.items()}
        for _ in range(spares):
            cluster.start_node()
        if spares:
            cluster.wait_event("spare", count=spares)

    def ranks_of(self, index: int) -> list[int]:
        """The ranks that a node had when the job began."""
        return sorted(rank for rank, home in self._homes.items() if home == index)

    def leader(self) -> int:
        """Index of the node that leads."""
        return self.cluster.node_with(self.registry.leader())

    def follower(self, *others: int) -> int:
        """Index of a node that has had ranks from the beginning, does not lead, and is none of the others."""
        return min(set(self._homes.values()) - {self.leader(), *others})

    def frozen(self, count: int) -> dict[int, int]:
        """Pid to index of node, once so many processes have stopped themselves, with all their threads."""

        def look() -> dict[int, int] | None:
            stopped = _stopped()
            if len(stopped) < count:  # spares a look at what belongs to whom
                return None
            homes = enumerate(self.cluster.nodes)
            found = {pid: index for index, node in homes for pid, _ in node.processes() if pid in stopped}
            return found if len(found) == count else None

        found = self.cluster.wait_for(look, lambda: f"{count} stopped processes", every=0.05)
        for pid in found:
            wait_stopped(self.cluster, pid)
        return found

    def thaw(self, stopped: dict[int, int], lost: Sequence[int] = ()) -> None:
        """Let those go on whose node is not lost."""
        for pid, index in stopped.items():
            if index not in lost:
                self.cluster.kill(pid, signal.SIGCONT)


def _stopped() -> set[int]:
    """All processes that a signal has stopped."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if stat.read_text().rpartition(") ")[2][0] == "T":
                found.add(int(stat.parent.name))
    return found


@contextmanager
def scene(
    tmp_path: Path,
    *args: str,
    nodes: int = 4,
    spares: int = 0,
    code: tuple[int, int] = (3, 1),
    buffers: int = 1,
    deadlines: dict[str, float] | None = None,
    network: Network | None = None,
    faults: str = "",
    members: int = 1,
    protect: dict[str, Any] | None = None,
    every: int = EVERY,
    per_node: int = PER_NODE,
    classes: dict[str, list[str]] | None = None,
) -> Iterator[Scene]:
    """A job of several nodes that has begun; its step `PROTECTED` lasts until all shadows are ready."""
    policy: dict[str, Any] = yaml.safe_load(POLICY.read_text())
    policy["protect"]["global"] |= {"data": code[0], "parity": code[1], "buffers": buffers, "every": every}
    policy["protect"] |= protect or {}
    policy["deadlines"] = deadlines or {}
    policy["classes"] = classes or {}
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))
    ranks = nodes * per_node
    place = network.switch if isinstance(network, Hosts) else None
    with (
        server(tmp_path / "etcd", place=place, members=members) as etcd,
        Cluster(
            TRAIN,
            *(*ARGS, *args, "--hold", f"{PROTECTED}:{ranks}"),
            run_dir=tmp_path / "run",
            endpoint=etcd.endpoints,
            nodes=nodes,
            nproc=per_node,
            nnodes=f"{nodes}:{nodes + 2}",
            network=network,
            faults=faults,
            conf={"config": str(tmp_path / "policy.yaml")},
            env={"PYTHONPATH": os.pathsep.join([str(DAMAGE), *filter(None, [os.environ.get("PYTHONPATH")])])},
            deadline=300,
        ) as cluster,
    ):
        yield Scene(cluster, etcd, ranks, spares)


def stop(ranks: Sequence[int], step: int, phase: str) -> str:
    """A plan by which these ranks stop there."""
    where = f"step={step} phase={phase}{' chunk=mid' if phase == 'update' else ''}"
    return "; ".join(f"stop rank={rank} {where}" for rank in ranks)


def flip(job: Scene, rank: int, segment: str) -> None:
    """Change one bit in a segment of a rank."""
    index = job.cluster.node_of(rank)
    local = job.ranks_of(index).index(rank)
    name = f"/memfd:leto-{local}-{segment} (deleted)"
    entries = Path(f"/proc/{job.cluster.nodes[index].pid}/fd").iterdir()
    (entry, *_) = [entry for entry in entries if str(entry.readlink()) == name]
    with entry.open("r+b") as file:
        where = os.fstat(file.fileno()).st_size // 4
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, where)[0] ^ 1]), where)


def damage(job: Scene, index: int, what: str) -> None:
    """Change a bit of all "pieces" that a node holds, or of the next chunk that it puts on the "wire" to another."""
    node = job.cluster.nodes[index]
    os.kill(node.pid, signal.SIGRTMIN + {"pieces": 1, "wire": 2}[what])
    node.wait_output("pieces are damaged" if what == "pieces" else "the wire is damaged")


def check(job: Scene, expected: Outcome, lost: Sequence[int] = (), moved: Sequence[int] = ()) -> None:
    """The outcome is that of the undisturbed run, and nobody else but the ranks of lost nodes was touched."""
    job.cluster.expect_success(dead=lost)
    assert Outcome(job.cluster, STEPS, job.world_size) == expected
    recoveries = job.cluster.recoveries()
    assert all(0 <= int(str(recovery["lost_steps"])) <= EVERY for recovery in recoveries), recoveries
    for rank in set(range(job.world_size)) - set(moved):
        assert job.cluster.pid_of(rank) == job.first[rank], "a survivor's pid changed"
    assert (recoveries != []) == bool(moved)
