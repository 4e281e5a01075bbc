"""Jobs of several nodes that lose processes, nodes and links: what comes out equals the undisturbed run of one node."""

from __future__ import annotations

from pathlib import Path

import pytest

from leto_elastic.testing.cluster import Cluster
from leto_elastic.testing.network import Hosts, Loopback, why_no_hosts
from tests.process.etcd_server import server
from tests.process.runs import Reference
from tests.process.scene import ARGS, check, scene, stop

pytestmark = [pytest.mark.process, pytest.mark.nodes, pytest.mark.slow]

needs_hosts = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))


# ---- nothing lost


@needs_hosts
def test_hosts_train_what_one_node_trains(tmp_path: Path, reference: Reference) -> None:
    """On IPv6, so nothing may depend on the other, nor on loopback."""
    with Hosts(2, ipv6=True) as hosts, scene(tmp_path, nodes=2, network=hosts) as job:
        check(job, reference(*ARGS, deadline=240))


def test_agents_of_one_machine_train_what_one_node_trains(tmp_path: Path, reference: Reference) -> None:
    with scene(tmp_path, nodes=2, network=Loopback(apart=False)) as job:
        check(job, reference(*ARGS, deadline=240))


@pytest.mark.parametrize(("rank", "where"), [(0, "step=7 phase=compute"), (3, "step=8 phase=update chunk=mid")])
def test_a_process_is_repaired_on_its_node(rank: int, where: str, tmp_path: Path, reference: Reference) -> None:
    with scene(tmp_path, nodes=2, faults=f"kill rank={rank} {where}") as job:
        check(job, reference(*ARGS, deadline=240), moved=[rank])
        recoveries = job.cluster.recoveries()
        assert len(recoveries) == 2, "each node tells its own"
        assert {(told["lost_steps"], told["action"]) for told in recoveries} == {(0, "promote")}


def test_a_script_without_leto_is_started_again_on_all_nodes(tmp_path: Path) -> None:
    script = Path(__file__).with_name("plain_ranks.py")
    with (
        server(tmp_path / "etcd") as etcd,
        Cluster(
            script,
            run_dir=tmp_path / "run",
            endpoint=etcd.endpoints,
            nodes=2,
            nproc=2,
            options=["--max-restarts=1"],
        ) as cluster,
    ):
        cluster.expect_success()
        said = "".join(node.output() for node in cluster.nodes)
        assert all(f"rank {rank} of 4 at attempt 1" in said for rank in range(4))


# ---- a node lost


@pytest.mark.parametrize(
    ("code", "step", "phase", "who", "buffers"),
    [
        ((3, 1), 7, "compute", "follower", 1),
        ((3, 1), 8, "update", "leader", 1),
        ((3, 1), 9, "compute", "leader", 1),  # with the next version under way
        ((3, 1), 9, "update", "follower", 1),  # with the next version just agreed
        ((3, 1), 8, "update", "follower", 2),
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
        pytest.param(1, 1, 0, {}, id="nothing protected yet"),
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
