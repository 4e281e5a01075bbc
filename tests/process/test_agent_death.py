"""The agent is killed, and the same command goes on where its job stood: same bits, every sample once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from leto_elastic.launch import retention
from leto_elastic.testing.job import Job
from tests.process.runs import TRAIN, Outcome, Reference, wait_stopped

pytestmark = pytest.mark.process

ARGS = ("--parallel", "fsdp", "--hold", "3:2")
NPROC = 2
LETO = (sys.executable, "-m", "leto_elastic.cli")


class Run:
    """One run id, its directories, and the command that starts or goes on with it."""

    def __init__(self, root: Path) -> None:
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.run_dir = root / "run"
        self.shelf = root / "shelf"
        self.state = retention.directory_of(str(self.shelf), self.run_id)
        self.policy = root / "policy.yaml"
        self.policy.write_text(f"state: {{chunk_bytes: 65536, retain: file, dir: {self.shelf}}}\n")

    def start(self, faults: str = "", nproc: int = NPROC, run_id: str = "", run_dir: str = "") -> Job:
        return Job(
            TRAIN,
            *ARGS,
            run_dir=run_dir or self.run_dir,
            nproc=nproc,
            faults=faults,
            conf={"config": str(self.policy)},
            options=(f"--rdzv-id={run_id or self.run_id}",),
        )

    def killed_at(self, *faults: str) -> None:
        """Start it, SIGKILL the agent when these faults of kind `stop` have stopped their ranks."""
        with self.start("; ".join(faults)) as job:
            for fault in faults:
                rank = int(fault.split("rank=")[1].split()[0])
                job.wait_event("worker_started", role="trainer", rank=rank)
                wait_for_stop(job, job.pid_of(rank))
            job.kill_agent()
        assert self.state.exists()

    def flip(self, name: str, where: int) -> None:
        """Change one bit of a file of the state."""
        with (self.state / name).open("r+b") as file:
            (byte,) = os.pread(file.fileno(), 1, where)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), where)


def wait_for_stop(job: Job, pid: int) -> None:
    """Until this process has stopped itself."""
    state = Path(f"/proc/{pid}/stat")
    job.wait_for(
        lambda: True if state.read_text().rpartition(")")[2].split()[0] == "T" else None, lambda: f"{pid} stopped"
    )
    wait_stopped(job, pid)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    return Run(tmp_path)


@pytest.mark.parametrize(
    "faults",
    [
        ("stop rank=1 step=5 phase=compute",),
        ("stop rank=0 step=5 phase=update chunk=mid", "stop rank=1 step=5 phase=commit"),
    ],
    ids=["compute", "update"],
)
def test_the_same_command_goes_on(faults: tuple[str, ...], run: Run, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=NPROC)
    run.killed_at(*faults)
    with run.start() as job:
        job.expect_success()
        assert Outcome(job, 9, NPROC) == expected
        resumed = job.wait_event("resumed")
        assert resumed["step"] == (5 if "compute" in faults[0] else 6)
        (recovery,) = job.recoveries()
        assert (recovery["action"], recovery["ranks"], recovery["lost_steps"]) == ("adopt", [0, 1], 0)
        assert "going on at step" in job.output()
    assert not run.state.exists(), "a job that succeeded leaves nothing"


def test_what_must_not_be_used_is_told_and_kept(run: Run, reference: Reference) -> None:
    """One dead job after another: each refusal leaves the state as it is, and in the end nothing was lost."""
    expected = reference(*ARGS, nproc=NPROC)
    other = retention.Retention(str(run.shelf), "somebody else's", NPROC, 0.0)
    assert other.take() is None
    run.killed_at("stop rank=0 step=5 phase=compute")

    with run.start(nproc=3) as job:
        job.expect_failure()
        assert "it is of a job of 2 ranks, this one has 3" in job.output()
    weights = next(run.state.glob("1.weights*"))
    run.flip(weights.name, weights.stat().st_size // 3)
    with run.start() as job:
        job.expect_failure()
        assert "slot 1: " in job.output()
        assert "does not match its checksum" in job.output()
    run.flip(weights.name, weights.stat().st_size // 3)

    with run.start("stop rank=1 step=7 phase=backward") as job:
        job.wait_event("recovery")
        wait_for_stop(job, job.pid_of(1))
        with run.start(run_dir=f"{run.run_dir}2") as second:
            second.expect_failure()
            assert "in use by another agent" in second.output()
        listed = subprocess.run(
            [*LETO, "clean", f"--dir={run.shelf}", "--json", "--yes"], capture_output=True, check=True, text=True
        )
        assert str(run.state) not in listed.stdout, "its agent lives"
        job.kill_agent()
    with run.start() as job:
        job.expect_success()
        assert Outcome(job, 9, NPROC) == expected
        assert job.wait_event("resumed")["step"] == 7
    assert not run.state.exists()
    assert (other.path / "owner").exists(), "another run's"
    other.close(keep=False)


def test_a_job_that_is_told_to_end_can_be_gone_on_with(run: Run, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=NPROC)
    with run.start("stop rank=1 step=6 phase=compute") as job:
        job.wait_event("worker_started", role="trainer", rank=1)
        wait_for_stop(job, job.pid_of(1))
        job.kill(job.pid, signal.SIGTERM)
        job.expect_failure()
        assert "the same command goes on from there" in job.output()
    assert (
        subprocess.run([*LETO, "clean", f"--dir={run.shelf}"], capture_output=True, check=True, text=True).stdout.count(
            run.run_id
        )
        == 1
    )
    with run.start() as job:
        job.expect_success()
        assert Outcome(job, 9, NPROC) == expected
