"""The small parts of the agent: memory, segments, parameters, the seam, where output goes."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, rendezvous_handler_registry
from torch.distributed.launcher import api
from torch.distributed.run import run_script_path

from leto_elastic import plugin, wire
from leto_elastic.errors import ConfigError, NotEnoughMemory
from leto_elastic.launch import seam
from leto_elastic.launch.actions import Death
from leto_elastic.launch.logs import Logs, open_shadow_log
from leto_elastic.launch.rendezvous import LetoRendezvousHandler, parameters_of
from leto_elastic.launch.segments import Memory, MemoryGauge, Room, Segments
from leto_elastic.launch.setup import Entry, RunDirectory, entry_of
from leto_elastic.launch.stall import Stall
from leto_elastic.recovery.policy import FailureClass, ShadowPolicy

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Memory:
    """A machine of 16 GiB, 8 of them available, with these files besides."""
    defaults = {"proc/meminfo": f"MemTotal: {16 * GIB >> 10} kB\nMemAvailable: {8 * GIB >> 10} kB\n"}
    for name, text in {**defaults, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Memory(root / "proc", root / "cgroup")


def test_memory_of_a_machine_without_control_groups(tmp_path: Path) -> None:
    memory = machine(tmp_path, {})
    assert memory.room() == Room(8 * GIB, 16 * GIB, "the machine")
    assert memory.pressure() == 0.0


def test_memory_of_a_v2_group_counts_cache_as_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/job\n",
        "cgroup/pod/job/memory.max": "max\n",
        "cgroup/pod/memory.max": str(4 * GIB),
        "cgroup/pod/memory.current": str(3 * GIB),
        "cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
    }
    room = machine(tmp_path, files).room()
    assert (room.available, room.total) == (2 * GIB, 4 * GIB)
    assert room.source == f"the control group {tmp_path}/cgroup/pod"


def test_memory_of_a_v1_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n",
        "cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
        "cgroup/memory/job/memory.usage_in_bytes": str(GIB),
        "cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        "cgroup/memory/memory.usage_in_bytes": "0",
    }
    assert machine(tmp_path, files).room().available == GIB


def test_pressure(tmp_path: Path) -> None:
    text = "some avg10=31.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=9.00 avg60=0.00 avg300=0.00 total=1\n"
    assert machine(tmp_path, {"proc/pressure/memory": text}).pressure() == 31.5


def test_segments_are_zeroed_and_known_by_name(tmp_path: Path) -> None:
    segments = Segments(0, machine(tmp_path, {}))
    fd = segments.alloc("header", 4096)
    assert os.fstat(fd).st_size == 4096
    assert os.fstat(fd).st_blocks * 512 >= 4096, "reserved, not only promised"
    assert os.pread(fd, 4096, 0) == bytes(4096)
    assert segments.header is not None
    assert not segments.header.valid
    segments.alloc("weights", 100)
    assert list(segments.sizes.items()) == [("header", 4096), ("weights", 100)]
    with pytest.raises(NotEnoughMemory, match="has a segment 'weights' already"):
        segments.alloc("weights", 100)
    segments.clear()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_too_little_memory_is_refused_with_numbers(tmp_path: Path) -> None:
    segments = Segments(3, machine(tmp_path, {}))
    with pytest.raises(
        NotEnoughMemory, match=r"'weights' of slot 3 needs 9216\.0 MiB, the machine has 8192\.0 of 16384\.0"
    ):
        segments.alloc("weights", 9 * GIB)
    assert segments.fds == {}


def test_gauge_is_short_at_once_and_fine_only_later(tmp_path: Path) -> None:
    gauge = MemoryGauge(ShadowPolicy(min_free_fraction=0.6, retry_after=5.0), machine(tmp_path, {}))
    assert gauge.short(100.0) == "the machine has 8192 of 16384 MiB left"
    gauge = MemoryGauge(ShadowPolicy(retry_after=5.0), memory := machine(tmp_path, {}))
    assert gauge.short(100.0) is None
    high = "some avg10=50.00 avg60=0.00 avg300=0.00 total=0\n"
    machine(tmp_path, {"proc/pressure/memory": high})
    assert gauge.short(101.0) == "memory pressure is 50 %"
    machine(tmp_path, {"proc/pressure/memory": high.replace("50", "1")})
    assert gauge.short(105.9) == "memory was short a moment ago"
    assert gauge.short(106.1) is None
    assert memory.pressure() == 1.0


# ---- parameters


def parameters(endpoint: str = "", run_id: str = "none", nodes: int = 1, **conf: object) -> RendezvousParameters:
    return RendezvousParameters("leto", endpoint, run_id, nodes, nodes, None, timeout=900, **conf)


def test_parameters() -> None:
    found = parameters_of(parameters(config="p.yaml", run_dir="runs/a"))
    assert (found.run_id, found.config, found.run_dir, found.etcd) == ("none", "p.yaml", "runs/a", None)
    found = parameters_of(parameters("etcd:2379", "job", endpoints="other:1"))
    assert found.etcd is not None
    assert found.etcd.endpoints == ("etcd:2379", "other:1")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (parameters(nodes=2), "needs an etcd where the nodes meet"),
        (parameters(run_dri="x"), "unknown key 'run_dri'.*did you mean run_dir"),
        (parameters(run_dir=""), "run_dir in --rdzv-conf is empty"),
        (parameters("etcd:2379"), "--rdzv-id"),
    ],
)
def test_parameters_that_cannot_work(given: RendezvousParameters, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parameters_of(given)


def test_rendezvous_handler_is_complete() -> None:
    handler = LetoRendezvousHandler(parameters_of(parameters(run_id="x")))
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("leto", "x", True)
    assert (handler.num_nodes_waiting(), handler.is_closed()) == (0, False)
    first = handler.next_rendezvous()
    assert (first.rank, first.world_size) == (0, 1)
    first.store.set("key", "value")
    second = handler.next_rendezvous()
    assert not second.store.check(["key"]), "a new store each time"
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port
    assert handler.shutdown()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()


def test_entry_points() -> None:
    import sys

    assert entry_of(sys.executable, ("-u", "a.py", "--x")) == Entry("script", ("a.py", "--x"))
    assert entry_of(sys.executable, ("-u", "-m", "a.b", "1")) == Entry("module", ("a.b", "1"))
    assert entry_of("/opt/python", ("-u", "a.py")) == Entry("exec", ("/opt/python", "-u", "a.py"))
    assert entry_of(run_script_path, ("a.py", "1")) == Entry("script", ("a.py", "1"))
    assert Entry("script", ("a.py", "--local-rank=${local_rank}")).of(3) == ["a.py", "--local-rank=3"]
    with pytest.raises(ConfigError, match="not functions"):
        entry_of(print, ())


def test_run_directory_belongs_to_one_job(tmp_path: Path) -> None:
    first = RunDirectory(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="another job is using"):
        RunDirectory(str(tmp_path / "run"))
    first.close()
    RunDirectory(str(tmp_path / "run")).close()


# ---- plugin and seam


def test_plugin_is_registered_and_always_the_same_function() -> None:
    assert plugin.get_handler() is plugin.get_handler()
    assert rendezvous_handler_registry._registry["leto"] is plugin.create_handler


def test_seam_fits_this_torch() -> None:
    assert seam.misfit(api.launch_agent.__code__) is None
    seam.check_torch()


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.13", "2.130"])
def test_other_torch_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=f"leto works with torch 2.13, this is torch {version.replace('+', '.')}"):
        seam.check_torch(version)


def test_seam_is_loud_when_it_does_not_fit() -> None:
    def other_name(params: object) -> None:
        get_rendezvous_handler(params)  # type: ignore[name-defined]  # noqa: F821
        ElasticAgent()  # type: ignore[name-defined]  # noqa: F821

    def other_order(params: object) -> None:
        LocalElasticAgent()  # type: ignore[name-defined]  # noqa: F821
        get_rendezvous_handler(params)  # type: ignore[name-defined]  # noqa: F821

    assert "does not construct its agent by the name" in str(seam.misfit(other_name.__code__))
    assert "before it asks for" in str(seam.misfit(other_order.__code__))


def test_seam_refuses_a_call_from_elsewhere_and_a_name_that_others_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"was not asked for by .*launch_agent; use `leto run`"):
        seam.install()

    def launch_agent() -> None:
        seam.install()

    names = ("get_rendezvous_handler", "LocalElasticAgent", *launch_agent.__code__.co_names)
    code = launch_agent.__code__.replace(co_names=(*launch_agent.__code__.co_names, *names[:2]))
    caller = types.FunctionType(code, {"seam": seam})
    monkeypatch.setattr(api, "launch_agent", caller)
    caller()
    assert api.LocalElasticAgent is seam._construct
    caller()  # again, after a launch that came to nothing
    seam.remove()
    assert api.LocalElasticAgent is seam._genuine
    monkeypatch.setattr(api, "LocalElasticAgent", object)
    with pytest.raises(ConfigError, match="something else has replaced"):
        caller()


# ---- output, recovery record


def test_output_is_appended_and_errors_are_forgotten(tmp_path: Path) -> None:
    envs: dict[int, dict[str, str]] = {rank: {"TORCHELASTIC_RUN_ID": "x"} for rank in range(2)}
    logs = Logs(DefaultLogsSpecs(str(tmp_path), redirects={0: Std.ALL, 1: Std.NONE}), "role", envs, None, (None, None))
    out, _ = logs.streams(0)
    os.write(out, b"first\n")
    other = os.open(f"/proc/self/fd/{out}", os.O_WRONLY | os.O_APPEND)
    os.write(other, b"second\n")
    os.write(out, b"third\n")
    os.close(other)
    (path,) = tmp_path.glob("x_*/attempt_0/0/stdout.log")
    assert path.read_text() == "first\nsecond\nthird\n"
    error = Path(envs[1]["TORCHELASTIC_ERROR_FILE"])
    error.write_text("{}")
    logs.forget_error(1)
    assert not error.exists()
    logs.forget_error(1)
    logs.close()


def test_filtered_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    specs = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT)
    envs: dict[int, dict[str, str]] = {0: {"TORCHELASTIC_RUN_ID": "x"}}
    logs = Logs(specs, "role", envs, {0: "<0> "}, (["keep"], None))
    logs.start()
    os.write(logs.streams(0)[0], b"keep this\ndrop this\n")
    logs.close()
    (path,) = tmp_path.glob("x_*/attempt_0/filtered_stdout.log")
    assert path.read_text() == "<0> keep this\n"
    assert capfd.readouterr().out == "<0> keep this\n<0> drop this\n"


def test_shadow_logs(tmp_path: Path) -> None:
    fd = open_shadow_log(str(tmp_path / "logs"), 2, 7)
    os.write(fd, b"x")
    os.close(fd)
    assert (tmp_path / "logs" / "shadow.2.7.log").read_text() == "x"


def test_phases_of_a_recovery() -> None:
    death = Death(1, 1, 100, -9, FailureClass.SIGNAL, 4, "update", 2)
    stall = Stall(died=10.0, noticed=10.010, newest=4, deaths=[death], actions={1: "promote"}, launched=10.030)
    survivor = {"abort": 10.015, "rebuild": 10.060, "resolve": 10.061, "first_step": 10.100}
    promoted = {"attach": 10.040, "rebuild": 10.060, "resolve": 10.061, "first_step": 10.120}
    commits = {0: wire.Committed(1, 5, "forward", survivor), 1: wire.Committed(1, 5, "forward", promoted)}
    fields = stall.fields(1, commits, 10.121, {1: 200})
    assert fields["phases_ms"] == {
        "detect": 10.0,
        "plan": 20.0,
        "abort": 5.0,
        "rebuild": 30.0,
        "attach": 10.0,
        "resolve": 1.0,
        "first_step": 59.0,
    }
    assert fields["stall_ms"] == 120.0
    assert fields["resolution"] == "forward"
    assert fields["lost_steps"] == 0
    assert fields["pids"] == {"1": 200}
