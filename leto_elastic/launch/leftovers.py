"""What dead agents of this user have left on this host: found, told, removed. What a living one has is never touched.

Three things can be left by an agent that was killed: the files of a run's state (kept on purpose, see `retention`), the
directory of its etcd, and that of its socket. Each tells by itself whether its agent lives: the first two by a lock
that is held for as long as the agent lives, the third by whether somebody listens. What is being made has neither yet,
so nothing younger than `YOUNG` seconds counts as left unless it says whose it is.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from leto_elastic.coordinator import embedded
from leto_elastic.launch import retention

YOUNG = 60.0

_SOCKETS = "leto-"
_SOCKET = "agent"

Kind = Literal["state", "etcd", "socket"]


class Leftover(msgspec.Struct, frozen=True):
    """One directory of a dead agent.

    Args:
        kind: "state" of a run, which the same command would go on from; "etcd"; "socket".
        run_id: of a state; empty when it cannot be told.
        bytes: that it occupies.
        age: seconds since something in it changed.
    """

    kind: Kind
    run_id: str
    bytes: int
    age: float
    path: str


def find(states: Sequence[Path], temporary: Sequence[Path], now: float | None = None) -> list[Leftover]:
    """All leftovers: of states in the directories `states`, of the rest in `temporary`; `now` in unix seconds."""
    now = time.time() if now is None else now
    found = [_told("state", path, now) for base in states for path in _ours(base, retention.PREFIX) if _dead(path, now)]
    for base in temporary:
        found += [_told("etcd", path, now) for path in embedded.abandoned(base)]
        for path in _ours(base, _SOCKETS):
            if not path.name.startswith((retention.PREFIX, embedded.PREFIX)) and _unheard(path, now):
                found.append(_told("socket", path, now))
    return found


def remove(leftover: Leftover) -> bool:
    """Remove it. False when it is in use by now, or gone."""
    path = Path(leftover.path)
    if leftover.kind == "etcd":
        return embedded.remove(path)
    if leftover.kind == "socket":
        if not _unheard(path, time.time()):
            return False
        (path / _SOCKET).unlink(missing_ok=True)
        path.rmdir()
        return True
    lock = retention.lock_of(path)
    if lock is None:
        return False
    retention.remove(path)
    os.close(lock)
    return True


def table(found: Sequence[Leftover]) -> str:
    """Lines for a person."""
    rows = [("kind", "run id", "MiB", "age", "path")]
    rows += [(f.kind, f.run_id or "-", f"{f.bytes / (1 << 20):.1f}", _age(f.age), f.path) for f in found]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[-1]]) for r in rows)


def as_json(found: Sequence[Leftover]) -> str:
    """One JSON array."""
    return msgspec.json.format(msgspec.json.encode(list(found)), indent=2).decode()


def _ours(base: Path, prefix: str) -> Iterator[Path]:
    for path in sorted(base.glob(f"{prefix}*")):
        try:
            status = path.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            yield path


def _dead(path: Path, now: float) -> bool:
    if not retention.owner_of(path) and now - _changed(path) < YOUNG:
        return False
    if (lock := retention.lock_of(path)) is None:
        return False
    os.close(lock)
    return True


def _unheard(path: Path, now: float) -> bool:
    """Whether this is the directory of a socket that nobody listens on."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except OSError:
        return False
    if names not in ([], [_SOCKET]) or now - _changed(path) < YOUNG:
        return False
    if names and not stat.S_ISSOCK((path / _SOCKET).lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path / _SOCKET))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:  # of another kind, or it listens and is busy
            return False
    return False


def _changed(path: Path) -> float:
    times = [path.lstat().st_mtime]
    for entry in path.rglob("*"):
        try:
            times.append(entry.lstat().st_mtime)
        except OSError:
            continue
    return max(times)


def _told(kind: Kind, path: Path, now: float) -> Leftover:
    sizes = []
    for entry in path.rglob("*"):
        try:
            sizes.append(entry.lstat().st_blocks * 512)
        except OSError:
            continue
    run_id = retention.owner_of(path) if kind == "state" else ""
    return Leftover(kind, run_id, sum(sizes), round(max(0.0, now - _changed(path)), 1), str(path))


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
