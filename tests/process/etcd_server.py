"""Real etcd servers for tests: killed, stopped and started again at will, with TLS, users, or three members."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from leto_elastic.coordinator.client import EtcdClient
from leto_elastic.coordinator.embedded import _free_ports, find_binary
from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.testing.network import Place

T = TypeVar("T")

LIMIT = 30.0
"""Seconds that no test, and no server's start, may exceed; far above what they take."""


def run(test: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run an asyncio test within `LIMIT`; it must leave no task, thread or descriptor behind."""
    before = _held()

    async def guarded() -> T:
        async with asyncio.timeout(LIMIT):
            result = await test()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        # A call that was cancelled has a task of grpc's, which ends once its thread has heard of it.
        ours = {task for task in left if "_AioCall" not in repr(task)}
        assert not ours, f"tasks left behind: {ours}"
        if left:
            await asyncio.wait(left)
        return result

    result = asyncio.run(guarded())
    gc.collect()  # the last of grpc's objects takes its threads and their sockets along, a moment later
    deadline = time.monotonic() + LIMIT
    while (left := _held() - before) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not left, f"left behind: {dict(left)}"
    return result


def _held() -> Counter[str]:
    """Threads and descriptors of this process. What an earlier test left to the collector may go at any time."""
    held = Counter(f"{thread.name} ({thread.ident})" for thread in threading.enumerate())
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the directory
            link = str(entry.readlink())
            held[link] += link.startswith(("socket:", "pipe:", "anon_inode:[pidfd"))
    return held


def pause(pid: int) -> None:
    """SIGSTOP a process, and wait until all its threads stand still: the signal reaches them one by one."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + LIMIT
    while {stat.read_text().rpartition(") ")[2][0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")} != {"T"}:
        assert time.monotonic() < deadline


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds; the limit of the test is the deadline."""
    while not await condition():
        await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Certificates:
    """PEM files of an authority, of a server for 127.0.0.1 and localhost, and of a client."""

    ca: str
    cert: str
    key: str
    client_cert: str
    client_key: str

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        """Made by the openssl command."""

        def openssl(*arguments: str) -> None:
            subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

        directory.mkdir(parents=True)
        new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test", "-days", "2")
        for name, usage in (("server", "serverAuth,clientAuth"), ("client", "clientAuth")):
            (directory / "ext").write_text(f"subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage={usage}\n")
            openssl("req", *new_key, "-keyout", f"{name}.key", "-out", "csr", "-subj", f"/CN={name}")
            signed = ["-in", "csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "ext"]
            openssl("x509", "-req", *signed, "-out", f"{name}.pem", "-days", "2")
        names = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
        return cls(*(str(directory / name) for name in names))


class Server:
    """A cluster of one or three members.

    Args:
        directory: for data and logs.
        members: 1 or 3.
        certificates: serve by TLS.
        client_auth: and ask for client certificates.
        place: where they run; this process can only speak to those that are on its own loopback interface.
    """

    def __init__(
        self,
        directory: Path,
        members: int = 1,
        certificates: Certificates | None = None,
        client_auth: bool = False,
        place: Place | None = None,
    ) -> None:
        self._place = place if place is not None else Place("127.0.0.1")
        self._directory, self._certificates, self._client_auth = directory, certificates, client_auth
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ports = [_free_ports() for _ in range(members)]
        self._scheme = "http" if certificates is None else "https"
        self._wait_with: EtcdSettings | None = None
        directory.mkdir(parents=True)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._place.at(client) for client, _ in self._ports)

    def settings(self, **fields: Any) -> EtcdSettings:
        """How to connect, as a user that is given in `fields`."""
        if self._certificates is not None:
            fields = {"tls": True, "ca": self._certificates.ca, **fields}
            if self._client_auth:
                pair = {"cert": self._certificates.client_cert, "key": self._certificates.client_key}
                fields = {**pair, **fields}
        return EtcdSettings(endpoints=self.endpoints, **fields)

    def start(self, *members: int) -> None:
        """Start members (all by default) on their data, and wait until the cluster serves."""
        cluster = ",".join(f"m{i}=http://{self._place.at(peer)}" for i, (_, peer) in enumerate(self._ports))
        for i in members or range(len(self._ports)):
            client, peer = map(self._place.at, self._ports[i])
            arguments = {
                "name": f"m{i}",
                "data-dir": str(self._directory / f"m{i}"),
                "listen-client-urls": f"{self._scheme}://{client}",
                "advertise-client-urls": f"{self._scheme}://{client}",
                "listen-peer-urls": f"http://{peer}",
                "initial-advertise-peer-urls": f"http://{peer}",
                "initial-cluster": cluster,
                "heartbeat-interval": "20",
                "election-timeout": "200",
                "unsafe-no-fsync": "true",
                "bcrypt-cost": "4",
                "log-level": "error",
            }
            if self._certificates is not None:
                arguments |= {"cert-file": self._certificates.cert, "key-file": self._certificates.key}
                if self._client_auth:
                    arguments |= {"client-cert-auth": "true", "trusted-ca-file": self._certificates.ca}
            options = [f"--{name}={value}" for name, value in arguments.items()]
            command = [*self._place.launcher, find_binary(), *options]
            with (self._directory / f"m{i}.log").open("ab") as log:
                self._processes[i] = subprocess.Popen(command, stdout=log, stderr=log)
        asyncio.run(self.wait(members or range(len(self._ports))))

    async def wait(self, members: Any = (0,)) -> None:
        """Until these members serve requests."""
        for i in members:
            async with asyncio.timeout(LIMIT):
                while not await self._serves(i):
                    await asyncio.sleep(0.01)

    async def _serves(self, member: int) -> bool:
        assert self._processes[member].poll() is None, (self._directory / f"m{member}.log").read_text()
        if self._place.launcher:
            return await asyncio.to_thread(self._healthy, member)
        context = None
        if self._certificates is not None:
            context = ssl.create_default_context(cafile=self._certificates.ca)
            context.load_cert_chain(self._certificates.client_cert, self._certificates.client_key)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._ports[member][0], ssl=context)
        except OSError:
            return False
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n\r\n")
            return b'"true"' in await reader.read()
        except OSError:
            return False
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _healthy(self, member: int) -> bool:
        command = [*self._etcdctl(), f"--endpoints={self.endpoints[member]}", "endpoint", "health"]
        return subprocess.run(command, capture_output=True, check=False, timeout=LIMIT).returncode == 0

    def etcdctl(self, *arguments: str, stdin: str = "") -> str:
        """What etcd's own client prints, over plain HTTP, run where the servers are."""
        deadlines = [f"--{name}-timeout={LIMIT:g}s" for name in ("dial", "command")]
        command = [*self._etcdctl(), f"--endpoints={','.join(self.endpoints)}", *deadlines, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, timeout=LIMIT, input=stdin.encode())
        return done.stdout.decode()

    def _etcdctl(self) -> list[str]:
        return [*self._place.launcher, str(Path(find_binary()).with_name("etcdctl"))]

    def forget_tokens(self, user: str) -> None:
        """Make every token of a user invalid, by giving it the password that it has."""
        self.etcdctl("--user=root:rootpw", "user", "passwd", user, "--interactive=false", stdin=f"{user}pw")

    def enable_users(self) -> None:
        """Users root/rootpw, ann/annpw who may use /leto/, and bob/bobpw who may not."""
        for user in ("root", "ann", "bob"):
            self.etcdctl("user", "add", f"{user}:{user}pw")
        self.etcdctl("user", "grant-role", "root", "root")
        self.etcdctl("role", "add", "leto")
        self.etcdctl("role", "grant-permission", "leto", "--prefix=true", "readwrite", "/leto/")
        self.etcdctl("user", "grant-role", "ann", "leto")
        self.etcdctl("auth", "enable")

    def leader(self) -> int:
        """The member that leads the others."""
        statuses = json.loads(self.etcdctl("endpoint", "status", "--write-out=json"))
        ids = {one["Status"]["header"]["member_id"]: one["Endpoint"] for one in statuses}
        return self.endpoints.index(ids[statuses[0]["Status"]["leader"]])

    def pause(self, member: int = 0) -> None:
        """SIGSTOP a member."""
        pause(self._processes[member].pid)

    def resume(self, member: int = 0) -> None:
        """SIGCONT a member."""
        self._processes[member].send_signal(signal.SIGCONT)

    def kill(self, *members: int) -> None:
        """SIGKILL members (all by default) and reap them."""
        for i in members or list(self._processes):
            process = self._processes.pop(i)
            process.kill()
            process.wait()

    async def restart(self, *members: int) -> None:
        """Start killed members again, from within a test's loop."""
        await asyncio.to_thread(self.start, *members)


@contextlib.contextmanager
def server(directory: Path, **arguments: Any) -> Iterator[Server]:
    """A started server that is gone afterwards."""
    etcd = Server(directory, **arguments)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.kill()
        shutil.rmtree(directory)


async def connect(settings: EtcdSettings, timeout: float = 8.0) -> EtcdClient:
    """A client."""
    return await EtcdClient.open(settings, timeout=timeout)
