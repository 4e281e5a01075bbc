"""Jobs of several nodes that lose processes, nodes and links: what comes out equals the undisturbed run of one node.

To strike at a known moment, ranks stop themselves there (fault kind `stop`), the test waits until all threads of all of
them stand, strikes, and lets the others go on.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from leto_elastic.testing.cluster import Cluster
from leto_elastic.testing.network import Hosts, Loopback, Network, why_no_hosts
from tests.process.etcd_server import server
from tests.process.registry import Registry
from tests.process.runs import TRAIN, Outcome, Reference, trainers, wait_stopped

pytestmark = [pytest.mark.process, pytest.mark.nodes, pytest.mark.slow]

needs_hosts = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

POLICY = Path(__file__).with_name("policy_nodes.yaml")
STEPS = 16
EVERY = 3
PROTECTED = 6
"""The step that lasts until all shadows are ready, so the version that begins it is protected from then on."""

ARGS = ("--parallel", "fsdp", "--steps", str(STEPS))
PER_NODE = 2


class Scene:
    """A job that has begun: all its ranks run, and so many spares have come."""

    def __init__(self, cluster: Cluster, registry: Registry, world_size: int, spares: int) -> None:
        self.cluster, self.registry, self.world_size = cluster, registry, world_size
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
) -> Iterator[Scene]:
    """A job of several nodes that has begun; its step `PROTECTED` lasts until all shadows are ready."""
    policy: dict[str, Any] = yaml.safe_load(POLICY.read_text())
    policy["protect"]["global"] |= {"data": code[0], "parity": code[1], "buffers": buffers}
    policy["deadlines"] = deadlines or {}
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))
    ranks = nodes * PER_NODE
    place = network.switch if isinstance(network, Hosts) else None
    with (
        server(tmp_path / "etcd", place=place) as etcd,
        Cluster(
            TRAIN,
            *(*ARGS, *args, "--hold", f"{PROTECTED}:{ranks}"),
            run_dir=tmp_path / "run",
            endpoint=etcd.endpoints,
            nodes=nodes,
            nproc=PER_NODE,
            nnodes=f"{nodes}:{nodes + 2}",
            network=network,
            faults=faults,
            conf={"config": str(tmp_path / "policy.yaml")},
            deadline=300,
        ) as cluster,
    ):
        yield Scene(cluster, Registry(etcd), ranks, spares)


def stop(ranks: Sequence[int], step: int, phase: str) -> str:
    """A plan by which these ranks stop there."""
    where = f"step={step} phase={phase}{' chunk=mid' if phase == 'update' else ''}"
    return "; ".join(f"stop rank={rank} {where}" for rank in ranks)


def check(job: Scene, expected: Outcome, lost: Sequence[int] = (), moved: Sequence[int] = ()) -> None:
    """The outcome is that of the undisturbed run, and nobody else but the ranks of lost nodes was touched."""
    job.cluster.expect_success(dead=lost)
    assert Outcome(job.cluster, STEPS, job.world_size) == expected
    recoveries = job.cluster.recoveries()
    assert all(0 <= int(str(recovery["lost_steps"])) <= EVERY for recovery in recoveries), recoveries
    for rank in set(range(job.world_size)) - set(moved):
        assert job.cluster.pid_of(rank) == job.first[rank], "a survivor's pid changed"
    assert (recoveries != []) == bool(moved)


# ---- nothing lost


@needs_hosts
def test_hosts_train_what_one_node_trains(tmp_path: Path, reference: Reference) -> None:
    """On IPv6, so nothing may depend on the other, nor on loopback."""
    with Hosts(2, ipv6=True) as hosts, scene(tmp_path, nodes=2, network=hosts) as job:
        check(job, reference(*ARGS, deadline=240))


@pytest.mark.parametrize("apart", [False, True])
def test_agents_of_one_machine_train_what_one_node_trains(tmp_path: Path, reference: Reference, apart: bool) -> None:
    with scene(tmp_path, nodes=2, network=Loopback(apart=apart)) as job:
        check(job, reference(*ARGS, deadline=240))


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["step=7 phase=compute", "step=8 phase=update chunk=mid"])
def test_a_process_is_repaired_on_its_node(rank: int, where: str, tmp_path: Path, reference: Reference) -> None:
    with scene(tmp_path, nodes=2, faults=f"kill rank={rank} {where}") as job:
        check(job, reference(*ARGS, deadline=240), moved=[rank])
        recoveries = job.cluster.recoveries()
        assert len(recoveries) == 2, "each node tells its own"
        assert {(told["lost_steps"], told["action"]) for told in recoveries} == {(0, "promote")}


# ---- a node lost


@pytest.mark.parametrize(
    ("code", "step", "phase", "who", "buffers"),
    [
        ((3, 1), 7, "compute", "follower", 1),
        ((3, 1), 8, "update", "leader", 1),
        ((3, 1), 9, "compute", "leader", 1),  # with the next version under way
        ((3, 1), 9, "update", "follower", 1),  # with the next version just agreed
        ((3, 1), 8, "update", "follower", 2),
        ((2, 2), 7, "compute", "leader", 1),
        ((2, 2), 8, "update", "follower", 1),
    ],
)
def test_a_spare_takes_the_place_of_a_lost_node(
    code: tuple[int, int], step: int, phase: str, who: str, buffers: int, tmp_path: Path, reference: Reference
) -> None:
    expected = reference(*ARGS, nproc=8, deadline=240)
    with scene(tmp_path, spares=1, code=code, buffers=buffers, faults=stop(range(8), step, phase)) as job:
        stopped = job.frozen(8)
        assert job.registry.protected(8)[1] >= 0, "there is no version to go back to yet"
        victim = job.leader() if who == "leader" else job.follower()
        job.cluster.nodes[victim].kill_all()
        job.thaw(stopped, [victim])
        check(job, expected, lost=[victim], moved=job.ranks_of(victim))
        recovery = job.cluster.recoveries()[-1]
        assert recovery["action"] == "replace"
        assert recovery["ranks"] == job.ranks_of(victim)


def test_a_node_is_lost_amid_its_update_that_the_others_have_done(tmp_path: Path, reference: Reference) -> None:
    """They are a step ahead, where they wait for it."""
    expected = reference(*ARGS, nproc=8, deadline=240)
    with scene(tmp_path, spares=1, faults=stop([4, 5], 8, "update")) as job:
        victim = job.cluster.node_of(4)
        job.frozen(2)
        job.cluster.nodes[victim].kill_all()
        check(job, expected, lost=[victim], moved=[4, 5])


def test_two_nodes_are_lost_at_once(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=8, deadline=240)
    with scene(tmp_path, spares=2, code=(2, 2), faults=stop(range(8), 8, "update")) as job:
        stopped = job.frozen(8)
        lost = [job.leader(), job.follower()]
        for victim in lost:
            job.cluster.nodes[victim].kill_all()
        job.thaw(stopped, lost)
        check(job, expected, lost=lost, moved=[rank for victim in lost for rank in job.ranks_of(victim)])


@needs_hosts
@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_node_that_is_cut_off_is_replaced_and_ends_itself(who: str, tmp_path: Path, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=8, deadline=240)
    faults = stop(range(8), 7, "compute")
    with Hosts(5) as hosts, scene(tmp_path, spares=1, network=hosts, faults=faults, deadlines={"replace": 5.0}) as job:
        stopped = job.frozen(8)
        victim = job.leader() if who == "leader" else job.follower()
        job.cluster.link_down(victim)
        job.thaw(stopped)
        assert job.cluster.nodes[victim].wait() != 0
        assert job.cluster.nodes[victim].leftovers(5.0) == []
        check(job, expected, lost=[victim], moved=job.ranks_of(victim))


def test_a_lost_node_comes_back_as_its_own_spare(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=8, deadline=240)
    with scene(tmp_path, faults=stop(range(8), 7, "compute")) as job:
        stopped = job.frozen(8)
        victim = job.follower()
        job.cluster.nodes[victim].kill_all()
        job.thaw(stopped, [victim])
        job.cluster.wait_event("failure", cause="node")
        job.cluster.start_node(job.cluster.nodes[victim].number)
        check(job, expected, lost=[victim], moved=job.ranks_of(victim))


# ---- one after the other


def test_a_second_node_is_lost_after_redundancy_is_back(tmp_path: Path, reference: Reference) -> None:
    """One may be lost at a time, so what the first one kept must have been made again."""
    expected = reference(*ARGS, nproc=8, deadline=240)
    faults = f"{stop(range(8), 7, 'compute')}; {stop(range(8), 14, 'update')}"
    with scene(tmp_path, "--pace", "0.2", spares=2, faults=faults) as job:
        stopped = job.frozen(8)
        before = job.registry.protected(8)
        first = job.follower()
        job.cluster.nodes[first].kill_all()
        job.thaw(stopped, [first])
        stopped = job.frozen(8)
        assert job.registry.protected(8) > before, "protected again, all of it"
        second = job.follower(first)
        job.cluster.nodes[second].kill_all()
        job.thaw(stopped, [second])
        check(job, expected, lost=[first, second], moved=[r for i in (first, second) for r in job.ranks_of(i)])


@pytest.mark.parametrize("second", ["survivor", "spare"])
def test_a_second_node_is_lost_while_the_first_is_restored(second: str, tmp_path: Path, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=8, deadline=240)
    where = "stop rank=0 phase=rebuild" if second == "survivor" else "stop rank=4 phase=attach"
    with scene(tmp_path, spares=2, code=(2, 2), faults=f"{stop(range(8), 7, 'compute')}; {where}") as job:
        victims = [job.cluster.node_of(4)]
        stopped = job.frozen(8)
        job.cluster.nodes[victims[0]].kill_all()
        job.thaw(stopped, victims)
        (index,) = job.frozen(1).values()
        job.cluster.nodes[index].kill_all()
        victims.append(index)
        moved = {rank for victim in victims if victim < 4 for rank in job.ranks_of(victim)}
        check(job, expected, lost=victims, moved=sorted(moved))


# ---- too much lost


@pytest.mark.parametrize(
    ("lost", "spares", "step", "deadlines"),
    [
        pytest.param(2, 2, 7, {}, id="more than parity"),
        pytest.param(1, 0, 7, {"replace": 5.0}, id="no spare in time"),
        pytest.param(1, 1, 1, {}, id="nothing protected yet"),
    ],
)
def test_what_cannot_be_restored_ends_the_job_on_all_nodes(
    lost: int, spares: int, step: int, deadlines: dict[str, float], tmp_path: Path
) -> None:
    with scene(tmp_path, spares=spares, deadlines=deadlines, faults=stop(range(8), step, "compute")) as job:
        stopped = job.frozen(8)
        victims = [job.follower()]
        victims += [job.follower(*victims)] * (lost - 1)
        for victim in victims:
            job.cluster.nodes[victim].kill_all()
        job.thaw(stopped, victims)
        job.cluster.expect_failure(dead=victims)
        run = job.registry.run()
        assert run.state == "failed"
        assert run.reason
        assert job.cluster.digests() == {}
