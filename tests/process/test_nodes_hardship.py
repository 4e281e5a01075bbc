"""Jobs of several nodes when something else goes wrong too: etcd, memory that changed, comings at awkward moments."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.process.runs import Reference
from tests.process.scene import ARGS, PROTECTED, Scene, check, damage, flip, scene, stop

pytestmark = [pytest.mark.process, pytest.mark.nodes, pytest.mark.slow]


def test_a_snapshot_that_was_damaged_is_rebuilt_and_not_used(tmp_path: Path, reference: Reference) -> None:
    """A survivor would go back to it: another of its bits is wrong than any program would write."""
    expected = reference(*ARGS, nproc=8, deadline=240)
    with scene(tmp_path, spares=1, code=(2, 2), faults=stop(range(8), 8, "update")) as job:
        stopped = job.frozen(8)
        victim = job.follower()
        hurt = job.ranks_of(job.follower(victim))[0]
        flip(job, hurt, "snapshot.0")
        job.cluster.nodes[victim].kill_all()
        job.thaw(stopped, [victim])
        check(job, expected, lost=[victim], moved=[*job.ranks_of(victim), hurt])
        assert any(f"[{hurt}]" in str(event["what"]) for event in job.cluster.events() if event["event"] == "damaged")


def test_parity_that_was_damaged_is_another_loss(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=8, deadline=240)
    with scene(tmp_path, spares=1, code=(2, 2), faults=stop(range(8), 8, "update")) as job:
        stopped = job.frozen(8)
        victim = job.follower()
        damage(job, job.follower(victim), "pieces")
        job.cluster.nodes[victim].kill_all()
        job.thaw(stopped, [victim])
        check(job, expected, lost=[victim], moved=job.ranks_of(victim))
        damaged = [str(event["what"]) for event in job.cluster.events() if event["event"] == "damaged"]
        assert damaged
        assert all(what.startswith("parity piece") for what in damaged), damaged


def test_what_was_damaged_on_its_way_is_not_taken(tmp_path: Path, reference: Reference) -> None:
    """The version that it belonged to is whole all the same: a node is restored from it."""
    expected = reference(*ARGS, nproc=8, deadline=240)
    faults = f"{stop(range(8), 7, 'compute')}; {stop(range(8), 11, 'update')}"
    with scene(tmp_path, spares=1, faults=faults) as job:
        stopped = job.frozen(8)
        before = job.registry.protected(8)
        damage(job, victim := job.follower(), "wire")
        job.thaw(stopped)
        stopped = job.frozen(8)
        assert job.registry.protected(8) > before, "no version has gone over the wire"
        said = "".join(node.output() for node in job.cluster.nodes)
        assert "the payload of Chunk does not match its checksum" in said
        job.cluster.nodes[victim].kill_all()
        job.thaw(stopped, [victim])
        check(job, expected, lost=[victim], moved=job.ranks_of(victim))


@pytest.mark.parametrize("tier", ["local", "global"])
def test_memory_that_changed_under_a_dead_trainer_is_repaired(tier: str, tmp_path: Path, reference: Reference) -> None:
    """Its shadow would go on with it."""
    nodes = 1 if tier == "local" else 2
    expected = reference(*ARGS, nproc=4, deadline=240)
    protect = {"local": {"parity": 1}} if tier == "local" else {}
    faults = stop(range(4), 9, "compute")
    with scene(tmp_path, nodes=nodes, per_node=4 // nodes, protect=protect, every=1, faults=faults) as job:
        stopped = job.frozen(4)
        job.cluster.wait_for(lambda: job.registry.protected(4) >= (0, 9) or None, lambda: "version 9", every=0.1)
        flip(job, 1, "weights")
        job.cluster.kill(job.first[1])
        job.thaw({pid: index for pid, index in stopped.items() if pid != job.first[1]})
        check(job, expected, moved=[1])
        assert {told["lost_steps"] for told in job.cluster.recoveries()} == {0}
        assert any("[1]" in str(event["what"]) for event in job.cluster.events() if event["event"] == "damaged")


def _done(job: Scene, step: int) -> bool:
    """Whether every rank has committed that step."""
    paths = [job.cluster.run_dir / f"samples.rank{rank}.txt" for rank in range(job.world_size)]
    return all(len(path.read_text().splitlines()) > step for path in paths)


def test_training_does_not_notice_that_etcd_is_away(tmp_path: Path, reference: Reference) -> None:
    """For several leases, so that all of them have ended when it is back: nobody is taken for dead, nor for gone by a
    spare, which then waits to the end."""
    expected = reference(*ARGS, nproc=4, deadline=240)
    faults = stop(range(4), PROTECTED + 1, "compute")
    with scene(tmp_path, "--pace", "1", nodes=2, spares=1, faults=faults) as job:
        stopped = job.frozen(4)
        job.etcd.pause()
        job.thaw(stopped)
        job.cluster.wait_for(lambda: _done(job, PROTECTED + 7) or None, lambda: "six steps of a second each", every=0.2)
        job.etcd.resume()
        check(job, expected)


def test_a_node_is_lost_while_etcd_is_away(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=8, deadline=240)
    with scene(tmp_path, spares=1, faults=stop(range(8), 8, "compute")) as job:
        stopped = job.frozen(8)
        victim = job.follower()
        job.etcd.pause()
        job.cluster.nodes[victim].kill_all()
        job.thaw(stopped, [victim])
        deadline = time.monotonic() + 4.0
        job.cluster.wait_for(lambda: True if time.monotonic() > deadline else None, lambda: "4 seconds", every=0.2)
        job.etcd.resume()
        check(job, expected, lost=[victim], moved=job.ranks_of(victim))


def test_the_leader_of_etcd_dies_with_that_of_the_job(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=8, deadline=240)
    with scene(tmp_path, spares=1, members=3, faults=stop(range(8), 8, "update")) as job:
        stopped = job.frozen(8)
        victim = job.leader()
        job.etcd.kill(job.etcd.leader())
        job.cluster.nodes[victim].kill_all()
        job.thaw(stopped, [victim])
        check(job, expected, lost=[victim], moved=job.ranks_of(victim))


def test_a_spare_that_comes_and_goes_disturbs_nobody(tmp_path: Path, reference: Reference) -> None:
    """The last one ends with the job."""
    expected = reference(*ARGS, nproc=4, deadline=240)
    with scene(tmp_path, nodes=2, spares=1, faults=stop(range(4), 9, "compute")) as job:
        stopped = job.frozen(4)
        job.cluster.nodes[2].kill_all()
        job.cluster.start_node(job.cluster.nodes[2].number)
        job.cluster.wait_event("spare", count=2)
        job.thaw(stopped)
        check(job, expected, lost=[2])
