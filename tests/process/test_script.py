"""What a user's script does around its steps: objects from rank 0 at its start, side effects once per active rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leto_elastic.testing.job import Job

pytestmark = pytest.mark.process

TRACKER = Path(__file__).with_name("tracker.py")
ROOT = Path(__file__).parents[2]


def test_shadow_gets_the_object_and_the_tracker_starts_once_per_active_rank(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(ROOT)}
    faults = "kill rank=1 step=5 phase=backward"
    with Job(TRACKER, run_dir=tmp_path / "run", nproc=2, faults=faults, env=env, deadline=60) as job:
        first = {e["rank"]: e["pid"] for e in job_started(job, 2)}
        job.expect_success()
        promoted = job.pid_of(1)
        output = job.output()
    lines = [line.split() for line in (tmp_path / "run" / "tracker.txt").read_text().splitlines()]
    by_pid = {int(pid): (int(rank), name, int(of), shadow, was) for rank, pid, name, of, shadow, was in lines}
    assert len(lines) == len(by_pid) == 3, "the tracker starts once in each active process, in no parked shadow"
    origin = first[0]
    assert by_pid[int(str(first[0]))] == (0, "run-7", origin, "False", "False")
    assert by_pid[int(str(first[1]))] == (1, "run-7", origin, "False", "False")
    assert by_pid[promoted] == (1, "run-7", origin, "False", "True"), "it has the object of the trainers' set-up"
    assert f"name rank=1 run-7 pid={promoted}" in output, "a promoted shadow prints where its trainer printed"


def job_started(job: Job, count: int) -> list[dict[str, object]]:
    """The events of the first trainers."""
    job.wait_event("worker_started", count=count, role="trainer")
    return [e for e in job.events() if e["event"] == "worker_started" and e["role"] == "trainer"][:count]


def test_without_an_agent_init_says_how_to_start(tmp_path: Path) -> None:
    """`--standalone` silently replaces the rendezvous backend: the script must say so instead of hanging."""
    env = {"PYTHONPATH": str(ROOT)}
    with Job(TRACKER, run_dir=tmp_path / "run", nproc=2, options=["--standalone"], env=env, deadline=60) as job:
        job.expect_failure()
        assert "leave out --standalone" in job.output()
    assert "LETO_SOCKET" not in os.environ
