"""A rank hangs without dying: it is found, named, ended and replaced, and nobody else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from leto_elastic.testing.cluster import Cluster
from leto_elastic.testing.job import Event, Job
from tests.process.etcd_server import server
from tests.process.runs import Outcome, Reference, trainers

pytestmark = [pytest.mark.process, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("hangs.py")
POLICY = Path(__file__).with_name("policy_hangs.yaml")
RANKS = 3
ARGS = ("--parallel", "ddp", "--hold", "3:3", "--steps", "9")


def run(run_dir: Path, *args: str, faults: str = "") -> Job:
    conf = {"config": str(POLICY)}
    return Job(SCRIPT, *ARGS, *args, run_dir=run_dir, nproc=RANKS, faults=faults, conf=conf, deadline=90)


def check(job: Job | Cluster, expected: Outcome, rank: int, ranks: int = RANKS) -> Event:
    """This rank alone was replaced, for its hang, and nothing was lost; returns the event."""
    job.expect_success()
    (hang,) = [event for event in job.events() if event["event"] == "hang"]
    before = trainers(job, ranks)
    assert (hang["rank"], hang["pid"]) == (rank, before[rank])
    (failure,) = [event for event in job.events() if event["event"] == "failure"]
    assert (failure["rank"], failure["cause"]) == (rank, "hang")
    assert str(hang["reason"]) in str(failure["detail"])
    for recovery in job.recoveries():
        assert (recovery["ranks"], recovery["lost_steps"], recovery["cause"]) == ([rank], 0, "hang")
    for other in range(ranks):
        assert (job.pid_of(other) == before[other]) == (other != rank)
    assert Outcome(job, 9, ranks) == expected
    output = job.output() if isinstance(job, Job) else "".join(node.output() for node in job.nodes)
    assert output.count(f"rank {rank} (pid {before[rank]}) hangs at step 5") == 1
    return hang


def stacks(hang: Event) -> str:
    return Path(str(hang["stacks"])).read_text()


def test_stopped(tmp_path: Path, reference: Reference) -> None:
    with run(tmp_path / "run", faults="stop rank=1 step=5 phase=inside") as job:
        hang = check(job, reference(*ARGS, nproc=RANKS), 1)
    assert "no Python ran in it" in str(hang["reason"])
    assert "state T" in stacks(hang)


def test_sleeping_in_the_body(tmp_path: Path, reference: Reference) -> None:
    with run(tmp_path / "run", faults="sleep rank=2 step=5 phase=inside") as job:
        hang = check(job, reference(*ARGS, nproc=RANKS), 2)
    assert "did not enter the collective that 2 ranks wait in" in str(hang["reason"])
    assert 'hangs.py", line' in stacks(hang)
    assert "in body" in stacks(hang)


def test_holding_the_interpreters_lock(tmp_path: Path, reference: Reference) -> None:
    with run(tmp_path / "run", faults="hold rank=0 step=5 phase=inside") as job:
        hang = check(job, reference(*ARGS, nproc=RANKS), 0)
    assert "no Python ran in it" in str(hang["reason"])
    assert "in body" in stacks(hang)


def test_a_collective_left_out(tmp_path: Path, reference: Reference) -> None:
    with run(tmp_path / "run", "--skip", "1:5") as job:
        hang = check(job, reference(*ARGS, nproc=RANKS), 1)
    assert "did not enter the collective that 2 ranks wait in" in str(hang["reason"])
    assert 'train.py", line' in stacks(hang)


def test_a_collective_left_out_before_another_one_of_its_group(tmp_path: Path, reference: Reference) -> None:
    """What the ranks do there does not fit together: gloo lets them hang or fail, and nobody has died."""
    with run(tmp_path / "run", "--skip", "1:5", "--default") as job:
        hang = check(job, reference(*ARGS, nproc=RANKS), 1)
    assert "entered another collective than the others of its group" in str(hang["reason"])


def test_what_only_takes_long_is_left_alone(tmp_path: Path) -> None:
    """A first step that takes longer than any limit of later ones, steps that vary by 5 times, a pause."""
    varying = ("--first", "4", "--pace", "0.1:0.5", "--slow", "5,7,8,12,18", "--pause", "15:4")
    with run(tmp_path / "run", "--steps", "20", *varying) as job:
        job.expect_success()
        assert [event["event"] for event in job.events() if event["event"] in ("hang", "failure")] == []
    assert not list((tmp_path / "run" / "stacks").iterdir()), "nothing is left of who ended well"


def test_all_compute_for_too_long(tmp_path: Path) -> None:
    """Replacing one of them would not help: the job ends, and says what to do."""
    with run(tmp_path / "run", "--pace", "0:90", "--slow", "5") as job:
        job.expect_failure()
        assert "no rank waits in a collective" in job.output()
        assert "leto.pause_watch()" in job.output()
        assert len([event for event in job.events() if event["event"] == "hang"]) == RANKS


def test_several_nodes_agree_on_the_one_that_sleeps(tmp_path: Path, reference: Reference) -> None:
    args = (*ARGS, "--hold", "3:4")
    expected = reference(*args)
    with (
        server(tmp_path / "etcd") as etcd,
        Cluster(
            SCRIPT,
            *args,
            run_dir=tmp_path / "run",
            endpoint=etcd.endpoints,
            nodes=2,
            nproc=2,
            faults="sleep rank=3 step=5 phase=inside",
            conf={"config": str(POLICY)},
            deadline=120,
        ) as cluster,
    ):
        hang = check(cluster, expected, 3, ranks=4)
        assert len(cluster.recoveries()) == 2, "each node tells its own"
    assert "did not enter the collective that 3 ranks wait in" in str(hang["reason"])
    assert "in body" in stacks(hang)
