"""Out of memory: told from other ends, and what follows for the shadows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leto_elastic.errors import NotEnoughMemory
from leto_elastic.launch.actions import Kill, Report
from leto_elastic.launch.oom import WINDOW, OomWatch
from leto_elastic.launch.segments import Memory, MemoryGauge
from leto_elastic.recovery.policy import FailureClass, ShadowPolicy
from leto_elastic.worker.memory import is_out_of_memory
from tests.unit.test_launch_job import Told, of
from tests.unit.test_launch_parts import GIB, machine

V2 = {
    "proc/7/cgroup": "0::/pod/job\n",
    "proc/7/status": "Name: x\nRssAnon:\t  2097152 kB\n",
    "proc/8/cgroup": "0::/pod/job\n",
    "cgroup/pod/job/memory.max": "max\n",
    "cgroup/pod/job/memory.current": str(3 * GIB),
    "cgroup/pod/memory.max": str(4 * GIB),
    "cgroup/pod/memory.current": str(4 * GIB),
    "cgroup/pod/memory.peak": str(4 * GIB),
}


class Machine:
    """A machine with one control group, whose kernel can be told to have killed something in it."""

    def __init__(self, root: Path, files: dict[str, str] = V2, events: str = "cgroup/pod/job/memory.events") -> None:
        self.root, self.events, self.kills = root, events, 3
        self.memory: Memory = machine(root, files)
        self.count(0)
        self.watch = OomWatch(self.memory, root / "proc")
        for pid in (7, 8):
            self.watch.joined(pid)

    def count(self, kills: int) -> None:
        self.kills += kills
        machine(self.root, {self.events: f"oom 9\noom_kill {self.kills}\noom_group_kill 9\n"})


def test_a_kill_that_was_counted_is_told_with_the_numbers(tmp_path: Path) -> None:
    box = Machine(tmp_path)
    box.watch.look(99.0)
    box.count(1)
    told = box.watch.ended(7, -9, 100.0)
    assert told == (
        f"killed by the kernel for want of memory: the limit of the control group {tmp_path}/cgroup/pod is 4096 MiB, "
        "in use 4096, at most 4096; the process had 2048 MiB of its own when last looked at"
    )
    assert box.watch.ended(8, -9, 100.0) is None, "it explains one end"


def test_other_ends_are_not_for_want_of_memory(tmp_path: Path) -> None:
    box = Machine(tmp_path)
    assert box.watch.ended(7, -9, 100.0) is None, "what was counted before says nothing"
    box.watch.joined(7)
    box.count(1)
    assert box.watch.ended(7, -11, 100.0) is None
    assert box.watch.ended(8, -9, 100.0) is not None, "an end by another signal leaves it"
    assert box.watch.ended(99, -9, 100.0) is None, "nobody was told of this one"


def test_a_data_loader_that_was_killed_for_memory(tmp_path: Path) -> None:
    box = Machine(tmp_path)
    says = "RuntimeError: DataLoader worker (pid 44) is killed by signal: Killed. "
    assert box.watch.ended(7, 1, 100.0, says) is None, "by somebody"
    box.count(1)
    told = box.watch.ended(8, 1, 100.0, says)
    assert told is not None
    assert told.startswith("a data loader of it was killed by the kernel for want of memory: the limit of ")


def test_a_kill_seen_long_before_the_end_does_not_explain_it(tmp_path: Path) -> None:
    box = Machine(tmp_path)
    box.count(1)
    box.watch.look(100.0)
    assert box.watch.ended(7, -9, 100.1 + WINDOW) is None
    box.count(1)
    box.watch.look(200.0)
    assert box.watch.ended(8, -9, 199.9 + WINDOW) is not None


def test_v1_counts_in_its_own_file(tmp_path: Path) -> None:
    files = {
        "proc/7/cgroup": "4:memory:/job\n0::/\n",
        "proc/8/cgroup": "4:memory:/elsewhere\n",
        "cgroup/memory/job/memory.limit_in_bytes": str(GIB),
        "cgroup/memory/job/memory.usage_in_bytes": str(GIB),
        "cgroup/memory/elsewhere/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    }
    box = Machine(tmp_path, files, "cgroup/memory/job/memory.oom_control")
    box.count(1)
    assert box.watch.ended(8, -9, 100.0) is None, "that was in another group"
    told = box.watch.ended(7, -9, 100.0)
    assert told is not None
    assert "1024 MiB" in told


def test_without_counters_a_signal_is_a_signal(tmp_path: Path) -> None:
    watch = OomWatch(machine(tmp_path, {"proc/7/cgroup": "0::/\n"}), tmp_path / "proc")
    watch.joined(7)
    watch.look(1.0)
    assert watch.ended(7, -9, 2.0) is None


def test_after_an_end_for_want_of_memory_shadows_wait(tmp_path: Path) -> None:
    gauge = MemoryGauge(ShadowPolicy(retry_after=5.0), machine(tmp_path, {}))
    gauge.hit(100.0)
    assert gauge.short(104.9) == "memory was short a moment ago"
    assert gauge.short(105.1) is None


def test_the_cause_is_oom_and_the_shadow_that_is_needed_stays() -> None:
    told = Told().parked()
    told.job.slots[1].killed_for_memory(told.job.members[1], "killed by the kernel")
    (report,) = of(Report, told.job.exited(1, -9, 1.0))
    assert (report.death.cause, report.death.detail) == (FailureClass.OOM, "killed by the kernel")
    assert of(Kill, told.job.memory("short")) == [Kill(3), Kill(5)], "the shadow of slot 1 will be promoted"


def test_a_shadow_killed_for_memory_is_no_sign_that_it_cannot_stand_in() -> None:
    told = Told(2)
    told.protect()
    for _ in range(4):
        key = told.standby(1, ready=False)
        told.job.slots[1].killed_for_memory(told.job.members[key], "killed")
        told.job.exited(key, -9, 1.0)
    assert told.job.slots[1].verdict is None
    assert told.job.slots[1].quick_deaths == 0


def test_an_exception_of_that_kind_is_oom_too_but_not_a_signal_after_it() -> None:
    told = Told().parked()
    for rank, code, cause in ((1, 1, FailureClass.OOM), (2, -9, FailureClass.SIGNAL)):
        told.job.failing(rank, "MemoryError: ", oom=True)
        (report,) = of(Report, told.job.exited(rank, code, 1.0))
        assert report.death.cause is cause


def test_which_exceptions() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 60)
    assert is_out_of_memory(of_torch.value)
    with pytest.raises(MemoryError) as of_python:
        bytearray(1 << 62)
    assert is_out_of_memory(of_python.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(NotEnoughMemory("no"))
    wrapped = ValueError("cannot load")
    wrapped.__cause__ = of_python.value
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("not enough memory for a joke"))
