"""Faults on purpose: `LETO_FAULTS="kill rank=2 step=5 phase=update chunk=1; exit rank=1 step=9 phase=compute"`.

Each fault fires once per job, not once per process: whoever fires it creates `<run_dir>/faults/<number>` first, with
`O_EXCL`, so a replacement that passes the same point does not fire it again. `prepare`, called by the agent before
anything starts, empties that directory and refuses a plan that cannot be read.

Grammar: faults separated by `;`, each `KIND key=value ...`:

    kind    kill (SIGKILL), exit (os._exit(17)), raise (RuntimeError), segv (a real SIGSEGV), stop (SIGSTOP),
            sleep (for ever, in Python), hold (for ever, in C, with the interpreter's lock),
            alloc (asks torch for more memory than there can be), eat (takes memory until the kernel kills it: only in
            a control group with a limit)
    rank=   the rank that does it
    phase=  compute, backward, vote, update, commit: needs step=
            rebuild, attach: while joining an epoch after a failure; step= is optional
            any other name: a point of the script's own, `leto_elastic.testing.point("name")`; step= is optional
    step=   step number, from 0
    chunk=  phase=update only: number of the chunk, mid or last; 0 without it. Fires when that chunk is half written
"""

from __future__ import annotations

import ctypes
import difflib
import faulthandler
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NoReturn, get_args

import msgspec

from leto_elastic.errors import ConfigError

ENV = "LETO_FAULTS"
EXIT_CODE = 17

Kind = Literal["kill", "exit", "raise", "segv", "stop", "sleep", "hold", "alloc", "eat"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STEP_PHASES = ("compute", "backward", "vote", "update", "commit")
RECOVERY_PHASES = ("rebuild", "attach")

_KEYS = ("rank", "step", "phase", "chunk")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_PR_SET_DUMPABLE = 4
_EVER = 1_000_000  # seconds


class InjectedFault(RuntimeError):
    """What a fault of kind `raise` raises."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault; `number` is its place in the plan, from 0."""

    number: int
    kind: Kind
    rank: int
    phase: str
    step: int | None
    chunk: int | Literal["mid", "last"] | None

    def matches(self, rank: int, phase: str, step: int | None, chunk: int | None, chunks: int | None) -> bool:
        """Whether it is to fire here. Raises ConfigError when its chunk does not exist in a plan of `chunks`."""
        if (self.rank, self.phase) != (rank, phase) or (self.step is not None and self.step != step):
            return False
        if phase != "update" or self.chunk is None:
            return True
        if chunks is None or chunk is None:
            raise ValueError("phase update needs chunk and chunks")
        if self.chunk == "mid":
            return chunk == chunks // 2
        if self.chunk == "last":
            return chunk == chunks - 1
        if self.chunk >= chunks:
            raise ConfigError(f"{ENV}: chunk={self.chunk} does not exist, an update here has {chunks} chunks, from 0")
        return chunk == self.chunk


def parse(text: str, world_size: int | None = None) -> tuple[Fault, ...]:
    """The faults of a plan. Raises ConfigError that says which fault, what was found and what is allowed."""
    entries = [entry.strip() for entry in text.split(";")]
    return tuple(_fault(number, entry, world_size) for number, entry in enumerate(e for e in entries if e))


def _fault(number: int, entry: str, world_size: int | None) -> Fault:
    def refuse(problem: str) -> NoReturn:
        raise ConfigError(f"{ENV}, fault {number + 1} ({entry!r}): {problem}")

    kind, *pairs = entry.split()
    if kind not in KINDS:
        refuse(f"{kind!r} is no kind of fault, allowed are {', '.join(KINDS)}")
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in _KEYS:
            refuse(f"{pair!r} is not understood, allowed are {', '.join(f'{k}=' for k in _KEYS)}")
        if key in values:
            refuse(f"{key}= is there twice")
        values[key] = value
    for key in ("rank", "phase"):
        if key not in values:
            refuse(f"{key}= is missing")
    numbers: dict[str, int] = {}
    for key in ("rank", "step", "chunk"):
        text = values.get(key)
        if text is None or (key == "chunk" and text in ("mid", "last")):
            continue
        if not (text.isascii() and text.isdecimal() and len(text) < 12):
            refuse(f"{key}={text}, allowed is a number from 0" + (", mid or last" if key == "chunk" else ""))
        numbers[key] = int(text)
    phase = values["phase"]
    if world_size is not None and numbers["rank"] >= world_size:
        refuse(f"rank={numbers['rank']}, but the ranks of this job are 0 to {world_size - 1}")
    _check_phase(phase, refuse)
    if phase in STEP_PHASES and "step" not in numbers:
        refuse(f"phase={phase} needs step=")
    if "chunk" in values and phase != "update":
        refuse(f"chunk= is for phase=update, not for phase={phase}")
    chunk: int | Literal["mid", "last"] | None = numbers.get("chunk", 0 if phase == "update" else None)
    match values.get("chunk"):
        case "mid" | "last" as chunk:
            pass
    return Fault(number=number, kind=kind, rank=numbers["rank"], phase=phase, step=numbers.get("step"), chunk=chunk)


def _check_phase(phase: str, refuse: Callable[[str], NoReturn]) -> None:
    known = (*STEP_PHASES, *RECOVERY_PHASES)
    if phase in known:
        return
    if not _NAME.fullmatch(phase):
        refuse(f"phase={phase}, allowed are {', '.join(known)} and the names of points of your own")
    near = difflib.get_close_matches(phase, known, n=1, cutoff=0.8)
    if near:
        refuse(f"phase={phase}: did you mean {near[0]}? (a point of your own needs a name that is less alike)")


def prepare(run_dir: str | Path, world_size: int | None, environ: Mapping[str, str] = os.environ) -> tuple[Fault, ...]:
    """Called once per job, before its first process: read the plan and forget what an earlier job fired.

    Raises ConfigError for a plan that cannot be read and OSError when the run directory cannot be written.
    """
    faults = parse(environ.get(ENV, ""), world_size)
    directory = Path(run_dir) / "faults"
    if directory.exists():
        shutil.rmtree(directory)
    if faults:
        directory.mkdir(parents=True)
    return faults


class Faults:
    """The faults of one rank, in one process. `on_fire` is called just before a fault ends the process."""

    def __init__(self, run_dir: str | Path, rank: int, plan: tuple[Fault, ...]) -> None:
        self.on_fire: Callable[[], None] | None = None
        self._directory = Path(run_dir) / "faults"
        self._rank = rank
        self._mine = tuple(fault for fault in plan if fault.rank == rank)
        self._step: int | None = None

    @classmethod
    def from_env(cls, run_dir: str | Path, rank: int, environ: Mapping[str, str] = os.environ) -> Faults:
        """The faults that `LETO_FAULTS` has for this rank. Raises ConfigError for a plan that cannot be read."""
        return cls(run_dir, rank, parse(environ.get(ENV, "")))

    def at(self, phase: str, step: int | None = None, chunk: int | None = None, chunks: int | None = None) -> None:
        """Passing this point: fires the first fault for it that has not fired in this job. Free without faults.

        Args:
            phase: one of the phases, or the name of a point.
            step: number of the step; None keeps the one passed last.
            chunk: for "update", the chunk that is half written now, out of `chunks`.
        """
        if not self._mine:
            return
        if step is not None:
            self._step = step
        for fault in self._mine:
            if fault.matches(self._rank, phase, self._step, chunk, chunks) and self._claim(fault):
                self._fire(fault)
                return

    def expects(self, phase: str) -> bool:
        """Whether the plan has a fault of this rank for `phase`, fired or not."""
        return any(fault.phase == phase for fault in self._mine)

    def _claim(self, fault: Fault) -> bool:
        try:
            fd = os.open(
                self._directory / str(fault.number), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600
            )
        except FileExistsError:
            return False
        os.close(fd)
        return True

    def _fire(self, fault: Fault) -> None:
        match fault.kind:
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            case "sleep":
                time.sleep(_EVER)
                return
            case "hold":
                ctypes.PyDLL(None).sleep(_EVER)  # keeps the interpreter's lock
                return
            case "eat":  # its last words would be too early
                _eat()
        if self.on_fire is not None:
            self.on_fire()
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(EXIT_CODE)
            case "raise":
                raise InjectedFault(f"fault {fault.number + 1} of {ENV}: rank {fault.rank}, phase {fault.phase}")
            case "segv":
                _segfault()
            case "alloc":
                import torch  # not at the top: the agent has no need for it here

                torch.empty(1 << 60)


def _eat() -> NoReturn:
    """Take memory until the kernel ends this process."""
    eaten = []
    while True:
        eaten.append(b"x" * (32 << 20))


def _segfault() -> NoReturn:
    """Read address 0, leaving no core file (also where cores are piped to a program, which ignore RLIMIT_CORE)."""
    faulthandler.disable()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    ctypes.string_at(0)
    raise AssertionError("reading address 0 did not end the process")


_installed: Faults | None = None


def install(faults: Faults | None) -> None:
    """What `point` asks from now on. A trainer installs its faults; a shadow does so when it is promoted."""
    global _installed
    _installed = faults


def point(name: str, step: int | None = None) -> None:
    """A point of the script's own that a plan can name: `phase=name`. Does nothing without a plan.

    Example:
        >>> from leto_elastic.testing import point
        >>> point("after_evaluation")
    """
    if _installed is not None:
        _installed.at(name, step)
