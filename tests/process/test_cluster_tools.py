"""The helpers that run jobs of several nodes, on a stand-in for torchrun: what they promise is so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from leto_elastic.coordinator.schema import Keys, NodeRecord, RunRecord, ShardRecord, encode
from leto_elastic.testing.cluster import Cluster
from leto_elastic.testing.job import JobError
from leto_elastic.testing.network import Hosts, Loopback, Place, why_no_hosts
from tests.process.etcd_server import server
from tests.process.registry import Registry

pytestmark = pytest.mark.process

needs_hosts = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

LAUNCHER = (sys.executable, str(Path(__file__).with_name("fake_agent.py")))
PORT = 4000

CONNECT = """
import socket, sys, time
host, port, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end = time.monotonic() + patience
while True:
    try:
        with socket.create_connection((host, port), timeout=patience) as connection:
            print(connection.recv(100).decode(), end="")
            break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"{type(error).__name__}: {error}")
"""


def cluster(tmp_path: Path, code: str, **arguments: Any) -> Cluster:
    """Stand-ins that run `code`."""
    arguments = {"nodes": 2, "deadline": 60.0, "endpoint": "127.0.0.1:1", "grace": 0.5, **arguments}
    return Cluster("script.py", code, run_dir=tmp_path / "run", launcher=LAUNCHER, **arguments)


def connect(source: Place, target: Place, patience: float) -> str:
    """What the server at `target` says to `source`. Raises CalledProcessError after `patience` seconds without."""
    command = [*source.launcher, sys.executable, "-c", CONNECT, target.address, str(PORT), str(patience)]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout


def namespaces() -> set[str]:
    """The network namespaces of this process's hosts."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, check=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(f"leto-{os.getpid()}-")}


@pytest.fixture(params=[False, True], ids=["ipv4", "ipv6"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    links = Path("/sys/class/net")
    before = sorted(links.iterdir())
    with Hosts(3, ipv6=request.param) as made:
        assert len(namespaces()) == 4
        assert sorted(links.iterdir()) == before, "this machine's own network is not touched"
        yield made
    assert namespaces() == set()


# ---- hosts


@needs_hosts
def test_hosts_reach_each_other_until_a_link_goes_down(tmp_path: Path, hosts: Hosts) -> None:
    with cluster(tmp_path, "serve()", network=hosts) as nodes:
        nodes.wait_event("run_started", count=2)
        first, second, third = (hosts.place(number) for number in range(3))
        said = connect(first, second, 10.0)
        assert said.split()[0] == second.address
        assert connect(third, first, 10.0).split()[1] != said.split()[1], "each host has a name of its own"
        nodes.link_down(1)
        with pytest.raises(subprocess.CalledProcessError) as caught:
            connect(first, second, 0.5)
        assert "refused" not in caught.value.stderr, "a host without a link answers nothing"
        assert connect(second, second, 10.0) == said, "it is cut off, not dead"
        assert connect(third, first, 10.0).split()[0] == first.address, "the others are not"
        nodes.link_up(1)
        assert connect(first, second, 10.0) == said


@needs_hosts
def test_hosts_share_no_memory(tmp_path: Path) -> None:
    code = "Path('/dev/shm', address).touch(); log.write('run_started', run_id='x', world_size=1); for_ever()"
    before = set(Path("/dev/shm").iterdir())
    with Hosts(2) as hosts, cluster(tmp_path, code, network=hosts) as nodes:
        nodes.wait_event("run_started", count=2)
        for node in nodes.nodes:
            mine = Path(f"/proc/{node.pid}/root/dev/shm")
            assert [path.name for path in mine.iterdir()] == [node.place.address]
        assert set(Path("/dev/shm").iterdir()) == before


@needs_hosts
@pytest.mark.parametrize("members", [1, 3])
def test_etcd_at_the_switch_serves_all_hosts(tmp_path: Path, hosts: Hosts, members: int) -> None:
    with server(tmp_path / "etcd", members=members, place=hosts.switch) as etcd:
        etcd.etcdctl("put", "key", "value")
        client = etcd._etcdctl()[-1]
        for number in range(3):
            for endpoint in etcd.endpoints:
                command = [*hosts.place(number).launcher, client, f"--endpoints={endpoint}", "get", "key"]
                found = subprocess.run(command, capture_output=True, check=True, text=True, timeout=30)
                assert found.stdout.split() == ["key", "value"]


@needs_hosts
def test_hosts_are_deleted_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), Hosts(2):
        raise KeyError
    assert namespaces() == set()
    made = Hosts(2)
    monkeypatch.setattr(made, "_name", lambda number: made._switch if number else f"{made._prefix}-h0")
    with pytest.raises(RuntimeError, match="File exists"), made:
        pass  # its second host had the name of the switch
    assert namespaces() == set()


def test_without_iproute2_hosts_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leto_elastic.testing.network._PATH", "/nonexistent")
    monkeypatch.setattr("leto_elastic.testing.network._CAPABILITIES", {})
    with pytest.raises(RuntimeError, match="install iproute2"), Hosts(1):
        pass


def test_without_rights_hosts_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leto_elastic.testing.network._CAPABILITIES", {"CAP_NONE": 63})
    with pytest.raises(RuntimeError, match="CAP_NONE"), Hosts(1):
        pass


# ---- clusters


def test_the_command_line_of_a_node(tmp_path: Path) -> None:
    code = "print(sys.argv[1:-1]); print(os.environ['LETO_FAULTS'], os.environ['EXTRA'])"
    arguments = {"nnodes": "2:3", "nproc": 3, "run_id": "name", "endpoint": ["a:1", "b:2", "c:3"], "options": ["--o=1"]}
    with cluster(tmp_path, f"import os; {code}", env={"EXTRA": "e"}, faults="f", **arguments) as nodes:
        nodes.expect_success()
        assert [node.place.address for node in nodes.nodes] == ["127.0.0.2", "127.0.0.3"]
        said = nodes.nodes[1].output()
    for option in ("nnodes=2:3", "nproc-per-node=3", "rdzv-endpoint=a:1", "rdzv-id=name", "local-addr=127.0.0.3"):
        assert f"'--{option}'" in said
    assert f"'--rdzv-conf=run_dir={tmp_path / 'run'},endpoints=b:2;c:3'" in said
    assert "'--o=1', 'script.py']" in said
    assert "\nf e\n" in said


def test_all_on_one_address(tmp_path: Path) -> None:
    with cluster(tmp_path, "print(address)", network=Loopback(apart=False)) as nodes:
        nodes.expect_success()
        assert [node.output() for node in nodes.nodes] == ["127.0.0.1\n"] * 2


def test_events_and_digests_of_all_nodes(tmp_path: Path) -> None:
    sha = "a" * 64
    code = f"""
started(int(address[-1]) - 2, subprocess.Popen(["true"]))
print(f"digest rank={{int(address[-1]) - 2}} step=9 sha256={sha}")
if address[-1] == "3":
    until_told()
    log.write("run_finished", state="SUCCEEDED")
"""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.old.jsonl").write_text('{"time": 1.0, "event": "run_finished", "state": "old"}\n')
    os.mkfifo(tmp_path / "run" / "go")
    with cluster(tmp_path, code) as nodes:
        nodes.wait_event("worker_started", count=2)
        (tmp_path / "run" / "go").write_bytes(b"")
        assert nodes.wait_event("run_finished")["file"] == "events.127.0.0.3.jsonl"
        nodes.expect_success()
        events = nodes.events()
        assert [event["time"] for event in events] == sorted(float(str(event["time"])) for event in events)
        assert sorted(str(event["file"]) for event in events) == ["events.127.0.0.2.jsonl"] + 2 * [
            "events.127.0.0.3.jsonl"
        ]
        assert {rank: digest.sha256 for rank, digest in nodes.digests().items()} == {0: sha, 1: sha}


def test_a_rank_that_moved_must_print_the_same_digest(tmp_path: Path) -> None:
    with cluster(tmp_path, "print('digest rank=0 step=9 sha256=' + address[-1] * 64)") as nodes:
        nodes.expect_success()
        with pytest.raises(JobError, match="rank 0 printed on node 1 another digest"):
            nodes.digests()


TREE = """
started(int(address[-1]), subprocess.Popen(["sleep", "3600"], start_new_session=True))
subprocess.Popen(["/usr/bin/env", "-i", "sleep", "3600"])
subprocess.Popen(["sh", "-c", "while :; do sleep 3600 & sleep 0.01; done"], start_new_session=True)
for_ever()
"""


def test_all_of_a_node_is_killed_and_it_comes_back(tmp_path: Path) -> None:
    """Also what is in another session, or has no environment, or is just being started; and nothing of the others."""
    with cluster(tmp_path, TREE) as nodes:
        nodes.wait_event("worker_started", count=2)
        hurt, other = nodes.nodes
        assert nodes.node_of(3) == 1
        assert nodes.node_with(other.pid) == 1
        assert nodes.resources().keys() == {0, 1}
        with pytest.raises(RuntimeError, match="still running"):
            nodes.start_node(0)
        with pytest.raises(JobError, match="not part of the job"):
            hurt.kill(other.pid)
        before = {pid: command for pid, command in other.processes() if command.endswith("sleep 3600")}
        assert len(before) > 2
        hurt.kill_all()
        assert hurt.processes() == []
        assert hurt.wait() == -signal.SIGKILL
        assert before.items() <= dict(other.processes()).items()
        assert nodes.resources().keys() == {1}
        again = nodes.start_node(0)
        assert (again.number, again.place, nodes.nodes.index(again)) == (0, hurt.place, 2)
        nodes.wait_event("worker_started", count=3)
        assert nodes.node_of(2) == 2, "the events of the node that was there before are kept as well"
        nodes.start_node()
        nodes.wait_event("worker_started", rank=4)
        for node in nodes.nodes:
            node.kill_all()
        with pytest.raises(JobError, match="all nodes ended without event recovery"):
            nodes.wait_event("recovery")


def test_the_living_must_succeed(tmp_path: Path) -> None:
    code = "for_ever() if address[-1] == '2' else until_told()"
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "go")
    with cluster(tmp_path, code) as nodes:
        nodes.interrupt(0)
        assert nodes.nodes[0].wait() == -signal.SIGTERM
        (tmp_path / "run" / "go").write_bytes(b"")
        nodes.expect_success(dead=(0,))
        with pytest.raises(JobError, match=r"node 0 ended with exit code -15(.|\n)*---- node 0, exit code -15, hurt"):
            nodes.expect_success()
        with pytest.raises(JobError, match="node 1 ended with exit code 0, a failure was expected"):
            nodes.expect_failure(dead=(0,))


def test_a_node_that_fails_by_itself_ends_every_wait(tmp_path: Path) -> None:
    with cluster(tmp_path, "sys.exit(7) if address[-1] == '3' else for_ever()") as nodes:
        for wait in (lambda: nodes.wait_event("recovery"), nodes.expect_success):
            with pytest.raises(JobError, match="node 1 ended with exit code 7"):
                wait()
        nodes.expect_failure(dead=(0,))


def test_the_deadline_ends_every_wait(tmp_path: Path) -> None:
    with cluster(tmp_path, "for_ever()", deadline=0.5) as nodes:
        for wait in (lambda: nodes.wait_event("x"), nodes.expect_success, nodes.expect_failure, nodes.nodes[0].wait):
            with pytest.raises(JobError, match=r"within 0\.5 s|still running after"):
                wait()


def test_what_a_node_leaves_is_reported_and_ended(tmp_path: Path) -> None:
    code = "subprocess.Popen(['sleep', '3600'], start_new_session=True)"
    nodes = cluster(tmp_path, code)
    with pytest.raises(JobError, match=r"1 processes were still there .* sleep 3600"), nodes:
        nodes.expect_success()
    assert [node.processes() for node in nodes.nodes] == [[], []]


def test_records_are_read_from_etcd(tmp_path: Path) -> None:
    keys = Keys("job")

    def shard(rank: int, version: int, state: Literal["complete", "repairing"] = "complete") -> None:
        fields: dict[str, Any] = {"generation": 1, "bytes": 8, "chunks": 1, "digest": "", "holders": (2,)}
        record = ShardRecord(rank=rank, version=version, state=state, **fields)
        etcd.etcdctl("put", keys.shard(rank), encode(record).decode())

    with server(tmp_path / "etcd") as etcd:
        registry = Registry(etcd)
        assert registry.protected(2) == (-1, -1)
        etcd.etcdctl("put", keys.node("a/b"), encode(NodeRecord(host="h", pid=17, slots=2)).decode())
        etcd.etcdctl("put", keys.leader, "a/b")
        etcd.etcdctl("put", keys.run, encode(RunRecord(owner="a/b", started=1.0, state="failed")).decode())
        assert registry.leader() == 17
        assert registry.run().state == "failed"
        shard(0, 6)
        assert registry.protected(2) == (-1, -1), "of one rank nothing is known"
        shard(1, 3)
        assert registry.protected(2) == (1, 3)
        shard(0, 6, "repairing")
        assert registry.protected(2) == (-1, -1)
