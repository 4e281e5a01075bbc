"""Segments as named files, so that a job's state outlives its agent too, and the next agent of the run goes on from it.

With `state.retain: file` one directory per run and user holds the segments of every slot, the set-up records, the
manifests and a file that says whose they are. What it guarantees to the agent that opens it:

* It is alone: the directory is locked for as long as an agent lives, and no process of the one before has a segment
  mapped any more. That is asked of the kernel (a write lease on a file is given only if nobody else has it open for
  writing, mappings included), because a lock ends a moment before an agent's children are killed.
* What is taken up is the state of this run, of the same number of ranks, at positions from which all of them can be
  resolved, in layouts that had reached the directory, and matches every checksum that it has. Otherwise nothing is
  taken up, and nothing is begun anew either: that would silently throw the training away.
* Whatever was left before all ranks had committed their first step holds nothing to go on from; the job begins anew.

The header is the one store that says what holds (see `state.header`), as after the death of a worker; so a SIGKILL of
agent and workers at any instant leaves a state that the ranks resolve as if all of them had died, which they have.

Rejected: writing the state out when the agent ends, which a SIGKILL does not wait for; giving the descriptors to a
process that outlives the agent, which would be one more process that may die.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import stat
import struct
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from leto_elastic.errors import ConfigError, StateError
from leto_elastic.launch.actions import Action, Emit
from leto_elastic.launch.job import Job
from leto_elastic.launch.segments import HEADER, Segments
from leto_elastic.launch.slots import Blob
from leto_elastic.protect.checksum import checksum_at
from leto_elastic.recovery.resolution import resolve
from leto_elastic.state import layout
from leto_elastic.state.header import HEADER_BYTES, Header, Phase, Position
from leto_elastic.state.verify import check
from leto_elastic.wire import StoreAddress

FORMAT = 1
PREFIX = "leto-run-"
LOCK = "lock"
_OWNER = "owner"
_SEGMENT = ".segment"
_LOOK = 0.01  # seconds between two looks whether others have let go
_BLOB = struct.Struct("<QI")  # length, CRC-32


class Owner(msgspec.Struct, frozen=True):
    """Whose state it is."""

    format: int
    run_id: str
    slots: int
    uid: int
    pid: int  # of the agent that began


@dataclass(frozen=True, slots=True)
class Found:
    """The state of a run that was taken up: by slot its segments (descriptors), record and manifest; and its step."""

    segments: tuple[dict[str, int], ...]
    records: tuple[Blob, ...]
    manifests: tuple[Blob, ...]
    step: int
    pid: int  # of the agent that began it
    where: str

    def into(self, job: Job, held: Sequence[Segments], store: StoreAddress) -> list[Action]:
        """Let a job that has not begun go on from here; the descriptors are its own from now on."""
        for slot, segments in zip(job.slots, held, strict=True):
            fds = self.segments[slot.index]
            segments.fds.update(fds)
            segments.sizes.update({name: os.fstat(fd).st_size for name, fd in fds.items()})
            segments.header = Header(fds[HEADER])
            segments.header.last_words = 0.0  # of a process of that agent
            slot.record, slot.manifest = self.records[slot.index], self.manifests[slot.index]
        event = Emit("resumed", {"step": self.step, "slots": len(job.slots), "dir": self.where, "agent": self.pid})
        return [event, *job.resume(store, time.monotonic())]


def directory_of(base: str, run_id: str) -> Path:
    """Where the state of a run of this user is."""
    name = hashlib.sha256(run_id.encode()).hexdigest()[:16]
    return Path(base, f"{PREFIX}{os.geteuid()}-{name}")


class Retention:
    """The directory of one run, locked for as long as this object is open.

    Args:
        base: a directory of this host; one in memory keeps what a crash of the host would lose anyway.
        run_id: of the job.
        slots: its ranks, all on this node.
        patience: seconds that processes of an agent that has just died may take to end.

    Raises ConfigError when another agent has it, or it is not ours.
    """

    def __init__(self, base: str, run_id: str, slots: int, patience: float) -> None:
        self.path = directory_of(base, run_id)
        self._owner = Owner(FORMAT, run_id, slots, os.geteuid(), os.getpid())
        self._patience = patience
        self._taken = False  # what is there is this job's
        self._lock: int | None = _locked(self.path, run_id, patience)

    # ---- at the start

    def take(self) -> Found | None:
        """What an earlier agent of the run left, None when it left nothing to go on from; the directory is empty then.

        Raises StateError, with the directory and what to do, for a state that must not be used.
        """
        try:
            found = self._find()
        except StateError as error:
            raise StateError(
                f"{self.path} holds the state of run {self._owner.run_id!r}, and it is not used: {error}. Start with "
                "another --rdzv-id, or remove it by `leto clean --yes` and begin anew"
            ) from error
        if found is None:
            self.begin()
        self._taken = True
        return found

    def _find(self) -> Found | None:
        if not (self.path / _OWNER).exists():
            return None
        try:
            owner = msgspec.msgpack.decode(self._read(_OWNER), type=Owner)
        except msgspec.DecodeError as error:
            raise StateError(f"{_OWNER} cannot be read: {error}") from error
        mine = self._owner
        if owner.format != FORMAT:
            raise StateError(f"it has format {owner.format}, this version of leto reads {FORMAT}")
        if owner.run_id != mine.run_id or owner.uid != mine.uid:
            raise StateError(f"it belongs to run {owner.run_id!r} of user {owner.uid}")
        if owner.slots != mine.slots:
            raise StateError(f"it is of a job of {owner.slots} ranks, this one has {mine.slots}")
        names = [name for name in sorted(os.listdir(self.path)) if name.endswith(_SEGMENT)]  # noqa: PTH208
        opened: dict[str, int] = {}
        try:
            for name in names:
                opened[name] = self._open(name)
            self._wait_alone(opened)
            found = self._check(owner, opened)
        except BaseException:  # boundary: descriptors closed, then raised
            _close(opened.values())
            raise
        if found is None:
            _close(opened.values())
        return found

    def _open(self, name: str) -> int:
        try:
            fd = os.open(self.path / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise StateError(f"{name} cannot be opened: {error.strerror}") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != self._owner.uid:
            os.close(fd)
            raise StateError(f"{name} is no file of this user")
        return fd

    def _wait_alone(self, opened: Mapping[str, int]) -> None:
        end = time.monotonic() + self._patience
        for name, fd in opened.items():
            while not _alone(fd):
                if time.monotonic() > end:
                    raise StateError(
                        f"a process still has {name} open {self._patience:g} s after its agent ended (deadlines.abort)"
                    )
                time.sleep(_LOOK)

    def _check(self, owner: Owner, opened: Mapping[str, int]) -> Found | None:
        segments: list[dict[str, int]] = []
        for slot in range(owner.slots):
            ours = {n.removesuffix(_SEGMENT).partition(".")[2]: n for n in opened if n.startswith(f"{slot}.")}
            segments.append({name: opened[file] for name, file in ours.items()})
        positions = {slot: _position(slot, fds) for slot, fds in enumerate(segments)}
        lacking = [s for s in range(owner.slots) if not (self._has(s, "manifest") and self._has(s, "record"))]
        known = {slot: position for slot, position in positions.items() if position is not None}
        if lacking or len(known) < owner.slots:
            if all(position.step <= 1 for position in known.values()):
                print(
                    f"leto: what {self.path} holds of run {owner.run_id!r} is from before all ranks had committed "
                    "their first step: beginning anew",
                    file=sys.stderr,
                )
                return None
            raise StateError(f"of slots {sorted({*lacking, *(set(positions) - set(known))})} something is missing")
        blobs = {kind: [self._read(f"{s}.{kind}") for s in range(owner.slots)] for kind in ("manifest", "record")}
        for slot, data in enumerate(blobs["manifest"]):
            try:
                manifest = layout.decode(data)
            except msgspec.DecodeError as error:
                raise StateError(f"the layout of slot {slot} cannot be read: {error}") from error
            try:
                check(manifest, segments[slot], checksum_at)
            except StateError as error:
                raise StateError(f"slot {slot}: {error}") from error
        step = resolve(known).step
        versions = [layout.decode(data).version for data in blobs["manifest"]]
        return Found(
            tuple(segments),
            tuple(_blob(data, 0) for data in blobs["record"]),
            tuple(_blob(data, version) for data, version in zip(blobs["manifest"], versions, strict=True)),
            step,
            owner.pid,
            str(self.path),
        )

    def _has(self, slot: int, kind: str) -> bool:
        return (self.path / f"{slot}.{kind}").exists()

    # ---- while the job runs

    def make(self, slot: int, name: str) -> int:
        """The file of a new segment, empty; the descriptor is the caller's. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path / f"{slot}.{name}{_SEGMENT}", flags, 0o600)

    def keep(self, slot: int, kind: str, blob: Blob) -> None:
        """Keep a slot's newest "record" or "manifest"."""
        self._write(f"{slot}.{kind}", os.pread(blob.fd, blob.size, 0))

    def _write(self, name: str, data: bytes) -> None:
        """Whole or not at all."""
        new = self.path / f"{name}.new"
        try:
            new.write_bytes(_BLOB.pack(len(data), zlib.crc32(data)) + data)
            new.rename(self.path / name)
        except OSError as error:
            raise StateError(f"state.dir: {new} cannot be written: {error.strerror}") from error

    def _read(self, name: str) -> bytes:
        try:
            content = (self.path / name).read_bytes()
        except OSError as error:
            raise StateError(f"{name} cannot be read: {error.strerror}") from error
        if len(content) < _BLOB.size:
            raise StateError(f"{name} is too short")
        data = content[_BLOB.size :]
        if _BLOB.unpack_from(content) != (len(data), zlib.crc32(data)):
            raise StateError(f"{name} does not match its checksum")
        return data

    def begin(self) -> None:
        """Remove what is there: a job begins that has no state yet."""
        for entry in self.path.iterdir():
            if entry.name != LOCK:
                entry.unlink()
        self._write(_OWNER, msgspec.msgpack.encode(self._owner))

    # ---- at the end

    def end(self, job: Job, *, succeeded: bool) -> None:
        """The job is over, and nothing runs any more: keep its state, said on the terminal, if it is of use."""
        keep = not succeeded and job.leto and job.protected
        if keep and self._taken:
            print(
                f"leto: the state of run {self._owner.run_id!r} at step {job.newest()} stays in {self.path}: the same "
                "command goes on from there, `leto clean` removes it",
                file=sys.stderr,
                flush=True,
            )
        self.close(keep=keep or not self._taken)

    def close(self, *, keep: bool) -> None:
        """Unlock the directory, which is removed unless it is to be kept."""
        if self._lock is None:
            return
        if not keep:
            remove(self.path)
        os.close(self._lock)
        self._lock = None


def lock_of(path: Path) -> int | None:
    """A descriptor that holds the lock of a retained directory; None when another process holds it, or it is gone."""
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == (path / LOCK).lstat().st_ino:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def remove(path: Path) -> None:
    """Remove a retained directory, whose lock the caller holds, and that last: who comes meanwhile is refused."""
    for entry in path.iterdir():
        if entry.name != LOCK:
            entry.unlink(missing_ok=True)
    (path / LOCK).unlink(missing_ok=True)
    path.rmdir()


def owner_of(path: Path) -> str:
    """The run id that a retained directory is of, as far as it can be read."""
    try:
        return msgspec.msgpack.decode((path / _OWNER).read_bytes()[_BLOB.size :], type=Owner).run_id
    except (OSError, msgspec.DecodeError):
        return ""


def _locked(path: Path, run_id: str, patience: float) -> int:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"state.dir: {path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"state.dir: {path} is no directory that only this user may enter; remove it")
    end = time.monotonic() + patience
    while (fd := lock_of(path)) is None:  # `leto clean` has it for a moment, too
        if time.monotonic() > end:
            raise ConfigError(
                f"the state of run {run_id!r} in {path} is in use by another agent; give another --rdzv-id, or end "
                "that job"
            )
        time.sleep(_LOOK)
    return fd


def _alone(fd: int) -> bool:
    """Whether no other descriptor or mapping of this file can write to it."""
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored; else whoever opens it now would end us by SIGIO
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StateError(f"the kernel cannot tell whether another process still uses it: {error.strerror}") from error
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _position(slot: int, fds: Mapping[str, int]) -> Position | None:
    """Where a slot stands; None without a header that was ever written."""
    if HEADER not in fds or os.fstat(fds[HEADER]).st_size != HEADER_BYTES:
        return None
    header = Header(fds[HEADER])
    try:
        position = header.position if header.valid else None
    except ValueError as error:
        raise StateError(f"the header of slot {slot} cannot be read: {error}") from error
    finally:
        header.close()
    return None if position is None or position.phase is Phase.SETUP else position


def _blob(data: bytes, version: int) -> Blob:
    fd = os.memfd_create("leto-retained", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return Blob(fd, len(data), version)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
