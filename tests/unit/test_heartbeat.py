"""Signs of life in a header: the beat, what is pending, counts of collectives, a pause."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import leto_elastic as leto
from leto_elastic.launch import stacks
from leto_elastic.recovery.policy import HangPolicy
from leto_elastic.state.header import GROUPS, HEADER_BYTES, Header, key_of
from leto_elastic.worker.heartbeat import Counter, Heartbeat


class Fabric:
    def __init__(self) -> None:
        self.watch: Any = None
        self.group = ""

    def count_in(self, watch: Any) -> None:
        self.watch = watch

    def pending(self) -> str:
        return self.group


@pytest.fixture
def header() -> Iterator[Header]:
    fd = os.memfd_create("header")
    os.ftruncate(fd, HEADER_BYTES)
    found = Header(fd)
    os.close(fd)
    found.initialise()
    yield found
    found.close()


def wait(look: Any) -> None:
    end = time.monotonic() + 20
    while not look():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_it_beats_at_once_and_goes_on(header: Header, tmp_path: Path) -> None:
    fabric: Any = Fabric()
    heart = Heartbeat(header, fabric, HangPolicy(heartbeat=0.05), tmp_path / "stacks")
    first = header.beat
    assert 0 < first <= time.monotonic()
    assert header.thread > 0
    wait(lambda: header.beat > first)
    fabric.group = "pairs"
    wait(lambda: header.waiting == key_of("pairs"))
    fabric.group = ""
    wait(lambda: header.waiting == 0)
    heart.stop()
    assert (header.beat, fabric.watch) == (0.0, None)


def test_a_pause_ends_with_its_block_and_may_be_nested(header: Header, tmp_path: Path) -> None:
    fabric: Any = Fabric()
    heart = Heartbeat(header, fabric, HangPolicy(pause=500), tmp_path / "stacks")
    with heart.pause():
        outer = header.paused
        assert outer == pytest.approx(time.monotonic() + 500, abs=5)
        with heart.pause():
            assert header.paused >= outer
        assert header.paused == outer
    assert header.paused == 0.0
    heart.stop()


def test_a_pause_outside_of_a_job_does_nothing() -> None:
    with leto.pause_watch():
        pass


def test_counts_begin_anew_with_an_epoch(header: Header) -> None:
    counter = Counter(header)
    counter.knows("default")
    counter.entered("default", 17)
    counter.entered("late", 18)
    assert header.groups == {key_of("default"): (1, 17), key_of("late"): (1, 18)}
    counter.restart()
    assert header.groups == {key_of("default"): (0, 0), key_of("late"): (0, 0)}
    counter.entered("default", 17)
    assert header.groups[key_of("default")] == (1, 17)


def test_more_groups_than_lines_still_are_progress(header: Header) -> None:
    counter = Counter(header)
    for number in range(GROUPS + 3):
        counter.knows(str(number))
    before = header.signs.progress
    counter.entered(str(GROUPS + 1), 17)
    assert header.signs.progress != before
    assert len(header.groups) == GROUPS
    assert set(header.groups.values()) == {(0, 0)}


ASLEEP = """
import sys, threading, time
from pathlib import Path
from leto_elastic.observe import stacks
stacks.answer(Path(sys.argv[1]))
def dozing():
    print(threading.get_native_id(), flush=True)
    time.sleep(1000)
threading.Thread(target=dozing, daemon=True).start()
print(sys.stdin.read())
"""


def test_stacks_are_written_by_the_process_or_told_by_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "stacks" / "rank0.pid1.txt"
    command = [sys.executable, "-c", ASLEEP, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        thread = int(process.stdout.readline())
        asyncio.run(stacks.save(process.pid, thread, path, "rank 0: a title"))
        text = path.read_text()
        assert text.startswith("rank 0: a title\n")
        assert "in dozing" in text
        assert "the kernel says" not in text
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        asyncio.run(stacks.save(process.pid, thread, path, "again"))
        assert "state T" in path.read_text().partition("again\n")[2]
        process.kill()
    asyncio.run(stacks.save(process.pid, thread, path, "gone"))
    assert "gone\n" in path.read_text()


def test_py_spy_has_a_second_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\n[ -e $0.slow ] && exec sleep 1000\necho $@\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = tmp_path / "stacks.txt"
    asyncio.run(stacks.save(os.getpid(), 0, path, "title"))
    assert f"dump --nonblocking --pid {os.getpid()}" in path.read_text()
    (tmp_path / "py-spy.slow").touch()
    monkeypatch.setattr(stacks, "_DEBUGGER", 0.1)
    asyncio.run(stacks.save(os.getpid(), 0, path, "title"))
    assert "py-spy did not end within 0.1 s" in path.read_text()
