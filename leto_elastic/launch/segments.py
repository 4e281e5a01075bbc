"""Segments: shared memory that a trainer's state lives in, owned by the agent, so that it outlives the trainer.

A memfd is used instead of a file in `/dev/shm`, which many containers limit to 64 MiB. Its pages are reserved at once:
a reservation that fails is one clear error here, a page that is missing later would be a SIGBUS in the middle of a
step. What is left is asked of the kernel first, because a cgroup's limit is not enforced by refusing but by killing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from leto_elastic.errors import NotEnoughMemory
from leto_elastic.recovery.policy import ShadowPolicy
from leto_elastic.state.header import Header

MIB = 1 << 20

HEADER = "header"


@dataclass(frozen=True, slots=True)
class Room:
    """Memory as the kernel tells it, bytes; the tightest of the machine and the control groups above us."""

    available: int
    total: int
    source: str


class Memory:
    """How much memory is left, from /proc and the cgroup file systems.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted (v2, or v1 with `memory/` in it).
    """

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroup = cgroup

    def room(self) -> Room:
        """What is left now. Files that a machine does not have count for nothing."""
        fields = dict(line.split(":", 1) for line in (self._proc / "meminfo").read_text().splitlines() if ":" in line)
        total = int(fields["MemTotal"].split()[0]) * 1024
        rooms = [Room(int(fields["MemAvailable"].split()[0]) * 1024, total, "the machine")]
        rooms += [room for room in (self._of_group(path) for path in self.groups()) if room.total < total]
        return min(rooms, key=lambda room: room.available)

    def pressure(self) -> float:
        """Percentage of the last ten seconds in which a task waited for memory; 0.0 where it is not told."""
        try:
            line = (self._proc / "pressure" / "memory").read_text().splitlines()[0]
        except (OSError, IndexError):
            return 0.0
        values = dict(part.split("=", 1) for part in line.split()[1:])
        return float(values.get("avg10", "0"))

    def groups(self, pid: str = "self") -> list[Path]:
        """Directories of the memory control group of a process and those above it, its own first."""
        try:
            lines = (self._proc / pid / "cgroup").read_text().splitlines()
        except OSError:
            return []
        found: list[Path] = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root = self._cgroup
            elif "memory" in controllers.split(","):
                root = self._cgroup / "memory"
            else:
                continue
            names = [name for name in path.split("/") if name not in ("", "..")]
            found += [root.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]
        return found

    def told(self, group: Path) -> str:
        """A control group's limit and use in numbers, for a human; the tightest limit of it and those above it."""
        above = [path for path in (group, *group.parents) if path.is_relative_to(self._cgroup)]
        told = []
        for limit, usage, peak in _FILES_OF_GROUP:
            limits = [(size, path) for path in above if (size := _number(path / limit)) is not None]
            if limits:
                size, where = min(limits, key=lambda pair: pair[0])
                told.append(f"the limit of the control group {where} is {size / MIB:.0f} MiB")
                values = (("in use", _number(where / usage)), ("at most", _number(where / peak)))
                told += [f"{name} {value / MIB:.0f}" for name, value in values if value is not None]
        return ", ".join(told) or f"the control group {group} has no limit"

    def _of_group(self, path: Path) -> Room:
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                total = int((path / limit).read_text())
                used = int((path / usage).read_text())
            except (OSError, ValueError):  # no such file, or "max"
                continue
            return Room(max(0, total - used + _stat(path, cache)), total, f"the control group {path}")
        return Room(1 << 63, 1 << 63, "no limit")


_FILES_OF_GROUP = (
    ("memory.max", "memory.current", "memory.peak"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes"),
)


def _number(file: Path) -> int | None:
    """Of a file with one number in it; None for no such file and for "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, key: str) -> int:
    try:
        lines = (path / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)


@dataclass
class Segments:
    """The segments of one slot, in the order in which they were asked for."""

    slot: int
    memory: Memory
    make: Callable[[int, str], int] | None = None  # (slot, name) -> a file instead of a memfd; may raise OSError
    fds: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    header: Header | None = None

    def alloc(self, name: str, size: int) -> int:
        """A new segment of `size` zeroed, reserved bytes; its descriptor, which stays ours.

        Raises NotEnoughMemory, with the numbers, when it does not fit or the name is taken.
        """
        if name in self.fds:
            raise NotEnoughMemory(f"slot {self.slot} has a segment {name!r} already")
        if size <= 0:
            raise NotEnoughMemory(f"segment {name!r} of slot {self.slot} would have {size} bytes")
        room = self.memory.room()
        if size > room.available:
            raise NotEnoughMemory(
                f"segment {name!r} of slot {self.slot} needs {size / MIB:.1f} MiB, {room.source} has "
                f"{room.available / MIB:.1f} of {room.total / MIB:.1f} MiB left; use a smaller model, fewer processes "
                "or more memory"
            )
        if self.make is None:
            fd = os.memfd_create(f"leto-{self.slot}-{name}", os.MFD_CLOEXEC)
        else:
            fd = self.make(self.slot, name)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise NotEnoughMemory(
                f"segment {name!r} of slot {self.slot} of {size / MIB:.1f} MiB cannot be reserved: {error.strerror}"
            ) from error
        self.fds[name], self.sizes[name] = fd, size
        if name == HEADER:
            self.header = Header(fd)
        return fd

    def clear(self) -> None:
        """Give all of it back."""
        if self.header is not None:
            self.header.close()
            self.header = None
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        self.sizes.clear()


class MemoryGauge:
    """Whether memory is too short to keep idle shadows. Short at once; fine again only `retry_after` seconds later."""

    def __init__(self, policy: ShadowPolicy, memory: Memory) -> None:
        self._policy = policy
        self._memory = memory
        self._last_short: float | None = None

    def short(self, now: float) -> str | None:
        """The reason why idle shadows must not be kept at `now` (monotonic seconds), or None."""
        reason = self._reason()
        if reason is not None:
            self._last_short = now
            return reason
        if self._last_short is not None and now - self._last_short < self._policy.retry_after:
            return "memory was short a moment ago"
        self._last_short = None
        return None

    def hit(self, now: float) -> str:
        """A process was out of memory at `now`; returns the reason why idle shadows must not be kept."""
        self._last_short = now
        return "a process was out of memory"

    def _reason(self) -> str | None:
        room = self._memory.room()
        if room.available < self._policy.min_free_fraction * room.total:
            return f"{room.source} has {room.available / MIB:.0f} of {room.total / MIB:.0f} MiB left"
        pressure = self._memory.pressure()
        if pressure > self._policy.max_pressure:
            return f"memory pressure is {pressure:.0f} %"
        return None
