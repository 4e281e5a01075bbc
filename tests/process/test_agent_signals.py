"""torchrun as a process of its own, and signals to it, with workers that need no torch."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from leto_elastic.testing.job import Job

pytestmark = [pytest.mark.process, pytest.mark.slow]

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
LAUNCHER = (sys.executable, str(Path(__file__).with_name("light_torchrun.py")))


@pytest.fixture
def scratch() -> Iterator[dict[str, str]]:
    """An environment whose temporary directory goes with the test: a killed agent cannot remove its own."""
    with tempfile.TemporaryDirectory() as directory:
        yield {"TMPDIR": directory}


def test_killed_agent_leaves_nobody(tmp_path: Path, scratch: dict[str, str]) -> None:
    with Job(FAKE_WORKER, run_dir=tmp_path / "run", nproc=2, launcher=LAUNCHER, env=scratch) as job:
        for rank in range(2):
            job.wait_event("shadow_ready", rank=rank)
        names = [name for _, name in job.processes()]
        assert len([name for name in names if "fake_worker.py" in name]) == 1 + 2 + 2, (
            names
        )  # torchrun's own has it too
        assert any("launch.zygote" in name for name in names), names
        assert any("etcd" in name for name in names), names
        job.kill(job.pid)
        assert job.wait() == -signal.SIGKILL
        assert job.leftovers(5.0) == []


def test_killed_agent_leaves_no_worker_of_a_plain_script(tmp_path: Path, scratch: dict[str, str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.write(1, f'up {os.environ[\"RANK\"]}\\n'.encode())\nsignal.pause()\n")
    with Job(script, run_dir=tmp_path / "run", nproc=2, launcher=LAUNCHER, env=scratch) as job:
        for rank in "01":
            job.wait_output(f"up {rank}")
        job.kill(job.pid)
        job.wait()
        assert job.leftovers(5.0) == []


def test_signals_reach_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "def note(number, frame):\n"
        "    os.write(1, f'got {os.environ[\"RANK\"]} {signal.Signals(number).name}\\n'.encode())\n"
        "    if number == signal.SIGTERM:\n"
        "        sys.exit(0)\n"
        "for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):\n"
        "    signal.signal(number, note)\n"
        "os.write(1, f'set up {os.environ[\"RANK\"]}\\n'.encode())\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    with Job(script, run_dir=tmp_path / "run", nproc=2, launcher=LAUNCHER) as job:
        for rank in "01":
            job.wait_output(f"set up {rank}")
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            job.kill(job.pid, number)
            for rank in "01":
                job.wait_output(f"got {rank} {number.name}")
        job.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 1, "as torchrun: a SignalException"
        output = job.output()
        assert sorted(re.findall(r"got (\d) SIGTERM", output)) == ["0", "1"]
        assert "SignalException: Process" in output
        assert job.leftovers(0.5) == []
