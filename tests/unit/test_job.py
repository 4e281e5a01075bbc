"""The helper that runs jobs under test, on a stand-in for torchrun: it must notice what goes wrong."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leto_elastic.testing.job import Digest, Job, JobError, resources

STAND_IN = """
import os, subprocess, sys, time
options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
run_dir = options["rdzv-conf"].removeprefix("run_dir=").split(",")[0]
sys.path.insert(0, os.getcwd())
from leto_elastic.observe.events import EventLog
log = EventLog(run_dir + "/events.jsonl")
exec(sys.argv[-1])
"""

HOUR = "subprocess.Popen(['sleep', '3600'])"
BARE = "subprocess.Popen(['/usr/bin/env', '-i', 'sleep', '3600'])"
HIDDEN = "subprocess.Popen(['sleep', '3600'], start_new_session=True)"


def job(tmp_path: Path, code: str, deadline: float = 60.0, grace: float = 0.2) -> Job:
    """A job whose torchrun is a script that runs `code`."""
    launcher = (sys.executable, "-c", STAND_IN)
    return Job("script.py", code, run_dir=tmp_path / "run", launcher=launcher, deadline=deadline, grace=grace)


@pytest.fixture
def never_left() -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    assert [left for one in jobs for left in one.leftovers(0)] == []


def test_events_output_and_digests(tmp_path: Path) -> None:
    code = f"""
log.write("run_started", run_id="x", world_size=4)
print("[default1]:digest rank=1 step=20 sha256={"a" * 64}")
print("digest rank=0 step=20 sha256={"b" * 64}", file=sys.stderr)
log.write("run_finished", state="SUCCEEDED")
"""
    with job(tmp_path, code) as running:
        running.expect_success()
        assert [event["event"] for event in running.events()] == ["run_started", "run_finished"]
        assert running.digests() == {1: Digest(20, "a" * 64), 0: Digest(20, "b" * 64)}
        assert "[default1]:digest" in running.output()


def test_an_event_is_waited_for_and_its_process_killed(tmp_path: Path) -> None:
    code = f"""
child = {HOUR}
log.write("worker_started", role="shadow", rank=2, slot=2, pid=1)
log.write("worker_started", role="trainer", rank=2, slot=2, pid=child.pid)
print("child ended with", child.wait())
"""
    with job(tmp_path, code) as running:
        event = running.wait_event("worker_started", role="trainer")
        assert event["pid"] == running.pid_of(2)
        with pytest.raises(JobError, match="not part of the job"):
            running.kill(os.getpid())
        running.kill(running.pid_of(2))
        running.wait_output(f"child ended with {-signal.SIGKILL}")
        running.expect_success()


def test_the_promoted_shadow_is_the_process_of_its_rank(tmp_path: Path) -> None:
    code = """
log.write("worker_started", role="trainer", rank=1, slot=1, pid=11)
log.write("worker_started", role="trainer", rank=2, slot=2, pid=12)
log.write("shadow_ready", rank=1, slot=1, pid=21)
log.write("recovery", rank=1, ranks=[1])
log.write("shadow_ready", rank=1, slot=1, pid=31)
log.write("recovery", rank=2, ranks=[2], pids={"2": 22})
"""
    with job(tmp_path, code) as running:
        assert running.wait() == 0
        assert (running.pid_of(1), running.pid_of(2)) == (21, 22)
        with pytest.raises(JobError, match="no event tells the process of rank 3"):
            running.pid_of(3)


def test_the_events_of_an_earlier_job_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    with job(tmp_path, 'log.write("run_finished", state="old")') as running:
        running.expect_success()
    with job(tmp_path, 'log.write("run_finished", state="new")') as running:
        assert running.wait_event("run_finished")["state"] == "new"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('oops'); sys.exit(3)", "exit code 3"),
        ("log.write('no_such_event')", "unknown event 'no_such_event'"),
        ("log.write('run_finished')", "run_finished: state is missing"),
    ],
)
def test_what_is_no_success(tmp_path: Path, code: str, said: str) -> None:
    with job(tmp_path, code) as running, pytest.raises(JobError, match=said) as error:
        running.expect_success()
    assert "last output" in str(error.value)


def test_a_success_is_no_failure(tmp_path: Path) -> None:
    with job(tmp_path, "pass") as running, pytest.raises(JobError, match="a failure was expected"):
        running.expect_failure()
    with job(tmp_path, "os.abort()") as running:
        assert running.expect_failure() == -signal.SIGABRT


def test_an_event_that_cannot_come_any_more_is_not_waited_for(tmp_path: Path) -> None:
    with job(tmp_path, "print('that is all')") as running:
        with pytest.raises(JobError, match=r"exit code 0 without event recovery(.|\n)*that is all"):
            running.wait_event("recovery")
        with pytest.raises(JobError, match="without printing"):
            running.wait_output("more")


def test_the_deadline_ends_every_wait(tmp_path: Path, never_left: list[Job]) -> None:
    with job(tmp_path, "import signal; signal.pause()", deadline=0.5) as running:
        never_left.append(running)
        for wait in (running.wait, lambda: running.wait_event("x"), lambda: running.wait_output("x")):
            with pytest.raises(JobError, match=r"0\.5 s"):
                wait()


@pytest.mark.parametrize("child", [HOUR, HIDDEN, BARE])
def test_what_is_left_is_reported_and_ended(tmp_path: Path, never_left: list[Job], child: str) -> None:
    running = job(tmp_path, child)
    never_left.append(running)
    with pytest.raises(JobError, match=r"1 processes were still there .* sleep 3600"), running:
        running.expect_success()


def test_an_error_inside_the_block_is_not_hidden_by_what_is_left(tmp_path: Path, never_left: list[Job]) -> None:
    running = job(tmp_path, HIDDEN)
    never_left.append(running)
    with pytest.raises(JobError, match="exit code 0, a failure was expected"), running:
        running.expect_failure()


def test_resources_of_a_process() -> None:
    before = resources(os.getpid())
    fds = [os.dup(0) for _ in range(7)]
    after = resources(os.getpid())
    for fd in fds:
        os.close(fd)
    assert after.fds - before.fds == 7
    assert after.rss > 1 << 20
    assert after.threads >= 1
