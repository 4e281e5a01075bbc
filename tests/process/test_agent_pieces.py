"""Single pieces of the agent with real processes and sockets: the tripwire, the process, the link."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leto_elastic import wire
from leto_elastic.launch import tripwire
from leto_elastic.launch.links import Link, Listener
from leto_elastic.launch.process import Exit, Process

pytestmark = pytest.mark.process


@pytest.fixture
def wire_fd() -> Iterator[int]:
    fd = tripwire.make()
    yield fd
    os.close(fd)


def armed_child(fd: int, code: str = "") -> subprocess.Popen[bytes]:
    """A child that has armed its wire and then runs some code, or waits."""
    boot = (
        "import os, sys, signal, time, threading; from leto_elastic.launch import tripwire; "
        "tripwire.arm(int(sys.argv[1])); os.setsid(); os.write(1, b'up\\n'); " + (code or "signal.pause()")
    )
    child = subprocess.Popen([sys.executable, "-c", boot, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    return child


def finish(child: subprocess.Popen[bytes]) -> int:
    child.kill()
    assert child.stdout is not None
    child.stdout.close()
    return child.wait()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_wire_trips_at_death_and_tells_how(wire_fd: int, stopped: bool) -> None:
    child = armed_child(wire_fd)
    assert tripwire.last_breath(child.pid) is None, "it lives"
    tripped = threading.Event()
    tripwire.watch(wire_fd, tripped.set)
    assert not tripped.is_set()
    if stopped:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    child.kill()
    assert tripped.wait(10.0)
    pidfd = os.pidfd_open(child.pid)
    select.select([pidfd], [], [], 10.0)  # at the latest now: every thread has ended
    os.close(pidfd)
    assert tripwire.last_breath(child.pid) == -signal.SIGKILL
    assert finish(child) == -signal.SIGKILL


@pytest.mark.parametrize(("code", "expected"), [("sys.exit(7)", 7), ("os.abort()", -signal.SIGABRT), ("pass", None)])
def test_last_breath_of_other_ends(wire_fd: int, code: str, expected: int | None) -> None:
    child = armed_child(wire_fd, f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {code}")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert tripwire.last_breath(child.pid) == expected, "0 is never told"
    finish(child)
    assert tripwire.last_breath(child.pid) is None


def test_last_breath_waits_for_every_thread(tmp_path: Path) -> None:
    for thread, flags in ((10, 0x40044C), (11, 0x400440)):
        task = tmp_path / "10" / "task" / str(thread)
        task.mkdir(parents=True)
        fields = ["R", "1", "1", "1", "0", "-1", str(flags), *["0"] * 42, "9"]
        (task / "stat").write_text(f"{thread} (a) b) {' '.join(fields)}\n")
    assert tripwire.last_breath(10, tmp_path) is None
    (tmp_path / "10" / "task" / "11" / "stat").unlink()
    assert tripwire.last_breath(10, tmp_path) == -9


def test_exit_is_told_once_and_then_reaped(wire_fd: int) -> None:
    told: list[str] = []

    async def watch() -> None:
        child = armed_child(wire_fd)
        reaped = asyncio.Event()

        def on_exit(end: Exit) -> None:
            assert Path(f"/proc/{child.pid}").exists(), "not reaped yet"
            assert end.code == -signal.SIGKILL
            assert end.noticed <= time.monotonic()
            told.append("exit")

        def on_reaped() -> None:
            told.append("reaped")
            reaped.set()

        process = Process(child.pid, wire_fd, on_exit, on_reaped)
        process.signal(signal.SIGKILL)
        await asyncio.wait_for(reaped.wait(), 10.0)
        process.signal(signal.SIGKILL)  # nobody is hit
        assert not Path(f"/proc/{child.pid}").exists()
        child.returncode = 0  # reaped by us, not by subprocess
        assert child.stdout is not None
        child.stdout.close()

    asyncio.run(watch())
    assert told == ["exit", "reaped"]


def test_link_queues_for_a_process_that_does_not_read_and_gives_it_up_in_the_end() -> None:
    async def talk() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setblocking(False)
        theirs.settimeout(10.0)
        ended: list[str] = []
        link = Link(ours, lambda message, fds: None, ended.append)
        fd = os.memfd_create("x")
        before = len(list(Path("/proc/self/fd").iterdir()))
        text = "x" * 1000
        for number in range(20):
            link.send(wire.Segment(f"{number}{text}", number), [fd])
        assert ended == []
        for number in range(20):
            message, fds = await asyncio.to_thread(wire.receive_from_agent, theirs)
            assert isinstance(message, wire.Segment)
            assert message.size == number
            assert len(fds) == 1
            os.close(fds[0])
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        for _ in range(200):
            link.send(wire.Stop(text))
        assert ended == ["it does not read its messages"]
        link.send(wire.Stop("into the void"))
        theirs.close()
        os.close(fd)

    asyncio.run(talk())


def test_listener_lets_in_who_knows_a_token_and_nobody_else() -> None:
    async def listen() -> None:
        known: list[str] = []

        def welcome(hello: wire.Hello, sock: socket.socket) -> bool:
            if hello.token != "right":
                return False
            known.append(hello.token)
            sock.close()
            return True

        listener = Listener(welcome)
        path = Path(listener.path)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        for first in (wire.Hello("wrong", 1), wire.Rehearsed(), None, wire.Hello("right", 1)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(listener.path)
                sock.settimeout(10.0)
                if first is None:
                    sock.send(b"\xc1 no message")
                else:
                    wire.send(sock, first)
                assert await asyncio.to_thread(sock.recv, 1) == b"", "closed"
        assert known == ["right"]
        listener.close()
        assert not path.parent.exists()

    asyncio.run(listen())
