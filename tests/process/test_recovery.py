"""A worker is killed, and the job goes on with the next step: same survivors, same bits, every sample once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from leto_elastic.testing.job import Job
from tests.process.runs import Outcome, Reference, train, trainers, wait_stopped

pytestmark = pytest.mark.process

PHASES = [
    "kill rank=1 step=5 phase=compute",
    "kill rank=0 step=5 phase=backward",
    "kill rank=2 step=5 phase=vote",
    "kill rank=3 step=5 phase=update chunk=0",
    "kill rank=1 step=5 phase=update chunk=mid",
    "kill rank=0 step=5 phase=update chunk=last",
    "kill rank=2 step=5 phase=commit",
]


def check(job: Job, expected: Outcome, ranks: list[int], steps: int = 9) -> dict[str, object]:
    """Everything that holds after each recovery in place of these ranks; returns the last recovery."""
    job.expect_success()
    recoveries = job.recoveries()
    assert recoveries
    assert all(recovery["lost_steps"] == 0 for recovery in recoveries)
    assert sorted({rank for recovery in recoveries for rank in recovery["ranks"]}) == sorted(ranks)  # type: ignore[attr-defined]
    before = trainers(job)
    for rank in set(range(4)) - set(ranks):
        assert job.pid_of(rank) == before[rank], "a survivor's pid changed"
    for rank in ranks:
        assert job.pid_of(rank) != before[rank]
    outcome = Outcome(job, steps)
    assert outcome.samples == expected.samples
    assert outcome.digests == expected.digests
    return recoveries[-1]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("fault", PHASES)
def test_killed_in_each_phase(fault: str, parallel: str, tmp_path: Path, reference: Reference) -> None:
    args = ("--parallel", parallel)
    expected = reference(*args)
    with train(tmp_path / "run", *args, faults=fault) as job:
        rank = int(fault.split("rank=")[1].split()[0])
        recovery = check(job, expected, [rank])
    assert recovery["action"] == "promote"
    assert recovery["resolution"] == ("forward" if "update" in fault or "commit" in fault else "rerun")
    failure = next(e for e in job.events() if e["event"] == "failure")
    assert (failure["rank"], failure["step"], failure["cause"]) == (rank, 5, "signal")


@pytest.mark.parametrize("kind", ["exit", "raise", "segv"])
def test_other_ways_to_die(kind: str, tmp_path: Path, reference: Reference) -> None:
    expected = reference("--parallel", "fsdp")
    with train(tmp_path / "run", "--parallel", "fsdp", faults=f"{kind} rank=2 step=5 phase=backward") as job:
        check(job, expected, [2])


def test_stopped_then_killed(tmp_path: Path, reference: Reference) -> None:
    """The survivors are blocked in a collective with a peer that neither answers nor closes its connections."""
    expected = reference("--parallel", "ddp")
    with train(tmp_path / "run", "--parallel", "ddp", faults="stop rank=2 step=5 phase=compute") as job:
        job.wait_event("shadow_ready", count=4)
        pid = trainers(job)[2]
        wait_stopped(job, pid)
        job.kill(pid, signal.SIGKILL)
        check(job, expected, [2])


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_at_once(parallel: str, tmp_path: Path, reference: Reference) -> None:
    expected = reference("--parallel", parallel)
    faults = "kill rank=1 step=5 phase=update chunk=mid; kill rank=2 step=5 phase=update chunk=0"
    with train(tmp_path / "run", "--parallel", parallel, faults=faults) as job:
        check(job, expected, [1, 2])


def test_all_ranks_at_once(tmp_path: Path, reference: Reference) -> None:
    expected = reference("--parallel", "fsdp")
    faults = "; ".join(f"kill rank={rank} step=5 phase=update chunk={chunk}" for rank, chunk in enumerate([0, 1, 0, 1]))
    with train(tmp_path / "run", "--parallel", "fsdp", faults=faults) as job:
        check(job, expected, [0, 1, 2, 3])


@pytest.mark.parametrize(
    "second", ["kill rank=0 phase=rebuild", "kill rank=1 phase=attach", "kill rank=3 phase=attach"]
)
def test_second_failure_during_the_recovery(second: str, tmp_path: Path, reference: Reference) -> None:
    """A survivor dies while it reconnects, or the promoted shadow while it attaches."""
    expected = reference("--parallel", "ddp")
    with train(
        tmp_path / "run", "--parallel", "ddp", faults=f"kill rank=3 step=5 phase=vote; {second}", deadline=120
    ) as job:
        rank = int(second.split("rank=")[1].split()[0])
        ranks = {3, rank} if rank != 1 else {3}
        check(job, expected, sorted(ranks))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_are_accumulated_in_the_step(parallel: str, tmp_path: Path, reference: Reference) -> None:
    """Killed after a micro-step that does not reduce gradients (`no_sync`, `set_requires_gradient_sync`)."""
    args = ("--parallel", parallel, "--accum", "2")
    expected = reference(*args)
    with train(tmp_path / "run", *args, faults="kill rank=1 step=5 phase=micro") as job:
        check(job, expected, [1])


def test_killed_during_evaluation(tmp_path: Path, reference: Reference) -> None:
    args = ("--parallel", "ddp", "--evaluate", "3")
    expected = reference(*args)
    with train(tmp_path / "run", *args, faults="kill rank=1 step=5 phase=evaluation") as job:
        check(job, expected, [1])
        lines = [line for line in job.output().splitlines() if line.startswith("evaluated")]
    assert len(lines) == 12, "3 evaluations by 4 ranks, each reported once"
    losses = {line.split("step=")[1] for line in lines}
    assert len(losses) == 3, "all ranks report the same, and nothing that came out of a lost collective"


def test_killed_during_set_up(tmp_path: Path) -> None:
    """Nothing is protected yet: the job ends, at once and clearly."""
    with train(tmp_path / "run", faults="kill rank=1 phase=setup", deadline=40) as job:
        job.expect_failure()
        assert "before every rank had committed its first step" in job.output()
        assert not job.recoveries()


def test_killed_after_the_last_step(tmp_path: Path, reference: Reference) -> None:
    """Nothing is missing but what the script does after its loop; only this rank does it again."""
    expected = reference("--parallel", "ddp")
    with train(tmp_path / "run", "--parallel", "ddp", faults="kill rank=2 phase=after") as job:
        job.expect_success()
        assert not job.recoveries()
        assert [e["rank"] for e in job.events() if e["event"] == "replaced"] == [2]
        assert Outcome(job, 9) == expected


def test_shadow_killed_while_parked(tmp_path: Path, reference: Reference) -> None:
    args = ("--parallel", "ddp", "--hold", "3:5")
    expected = reference("--parallel", "ddp")
    with train(tmp_path / "run", *args, faults="kill rank=1 step=5 phase=vote") as job:
        shadow = job.wait_event("shadow_ready", rank=1)
        job.kill(int(str(shadow["pid"])))
        check(job, expected, [1])


def test_without_a_shadow_the_slot_is_respawned(tmp_path: Path, reference: Reference) -> None:
    expected = reference("--parallel", "fsdp")
    policy = tmp_path / "policy.yaml"
    policy.write_text("state: {chunk_bytes: 65536}\nshadow: {per_slot: 0}\n")
    args = ("--parallel", "fsdp", "--hold", "3:0")
    with train(tmp_path / "run", *args, faults="kill rank=2 step=5 phase=update chunk=mid", config=policy) as job:
        recovery = check(job, expected, [2])
    assert recovery["action"] == "respawn"
