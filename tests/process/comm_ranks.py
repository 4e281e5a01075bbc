"""Ranks as forked processes of one script, for the tests of communicators.

The script imports torch once and forks; the parent then hosts the stores and plays the agent. A rank talks to it over a
socket pair with one JSON line a message.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from leto_elastic.comm import Fabric

DEADLINE = 60.0  # seconds; nothing here takes a tenth of it


def run_script(name: str, *args: str) -> dict[str, Any]:
    """Run a script of this folder that ends with one JSON line; its output is shown when it fails."""
    path = Path(__file__).with_name(name)
    root = path.parents[2]
    env = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, str(path), *args], env=env, cwd=root, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{name} {args} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


class Channel:
    """Messages between the parent and a rank."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("r")
        sock.settimeout(DEADLINE)

    def send(self, *message: Any) -> None:
        self._sock.sendall((json.dumps(message) + "\n").encode())

    def receive(self) -> list[Any]:
        line = self._file.readline()
        if not line:
            raise EOFError
        message: list[Any] = json.loads(line)
        return message

    def expect(self, word: str) -> list[Any]:
        message = self.receive()
        assert message[0] == word, message
        return message[1:]


class Rank:
    """A forked process; `main(rank, channel)` runs in it, its exceptions end up on stderr and in its exit status."""

    def __init__(self, rank: int, main: Callable[[int, Channel], None]) -> None:
        here, there = socket.socketpair()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            here.close()
            status = 1
            try:
                main(rank, Channel(there))
                status = 0
            except BaseException:  # noqa: BLE001 - the end of a process
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        there.close()
        self.rank = rank
        self.channel = Channel(here)

    def kill(self, sign: signal.Signals) -> None:
        os.kill(self.pid, sign)

    def end(self) -> int:
        """Wait for its end; kill it when it does not come."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return -signal.SIGKILL


def new_store() -> Any:
    """A store server of this process; `.port` is its port. Fork the ranks before the first one."""
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=DEADLINE), wait_for_workers=False)


def joined(rank: int, size: int, port: int, epoch: int = 0) -> Fabric:
    """The fabric of this process as one rank, connected, with torch's default group on it."""
    fabric = Fabric(rank, size, timeout=DEADLINE, rebuild=DEADLINE)
    fabric.register()
    fabric.connect(epoch, "127.0.0.1", port, DEADLINE)
    dist.init_process_group("leto", store=fabric.store, rank=rank, world_size=size)
    return fabric


class Listener:
    """A rank's end of the channel when the parent sends aborts: a thread does them, plans wait for the main thread."""

    def __init__(self, channel: Channel, abort: Callable[[int], None]) -> None:
        self._channel = channel
        self._abort = abort
        self._plans: list[list[Any]] = []
        self._changed = threading.Condition()
        self.aborted_at = 0.0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except (EOFError, OSError):
                return
            if message[0] == "abort":
                self.aborted_at = time.monotonic()
                self._abort(message[1])
            else:
                with self._changed:
                    self._plans.append(message)
                    self._changed.notify()

    def plan(self) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._plans, DEADLINE), "no plan came"
            return self._plans.pop(0)
