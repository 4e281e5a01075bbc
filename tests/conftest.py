"""What holds for every test: no test may leave a process or a shared-memory file behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from leto_elastic.testing.job import gone

MARK = "LETO_TEST_SESSION"


def marked(session: str) -> dict[int, str]:
    """Processes, other than this one, that inherited this session's mark: pid to command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={session}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = command
        except OSError:  # it ended, or is not ours to look at
            continue
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the session if a process started by a test, or a segment with a name, outlives it."""
    session = uuid.uuid4().hex
    os.environ[MARK] = session
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("tmp"))  # torchrun leaves its log directories there
    segments = set(Path("/dev/shm").iterdir())
    yield
    left = {pid: command for pid, command in marked(session).items() if not gone(pid, 5.0)}
    assert not left, f"processes left behind: {left}"
    named = {path for path in set(Path("/dev/shm").iterdir()) - segments if "leto" in path.name}
    assert not named, f"segments left behind in /dev/shm: {named}"


@pytest.fixture(autouse=True)
def one_thread_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share few cores; torchrun sets this too, but not for processes that a test starts itself."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
