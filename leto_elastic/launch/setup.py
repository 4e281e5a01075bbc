"""What a job is made of, gathered and checked before anything is started."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch.distributed.elastic.utils.api import macros
from torch.distributed.run import run_script_path

from leto_elastic.errors import ConfigError

_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Entry:
    """The user's program: see `leto_elastic.launch.forking.Start`."""

    kind: Literal["script", "module", "exec"]
    argv: tuple[str, ...]

    def of(self, local_rank: int) -> list[str]:
        """Its command line for a local rank, torchrun's macros filled in."""
        return [str(argument) for argument in macros.substitute(list(self.argv), str(local_rank))]


def entry_of(entrypoint: Callable[..., object] | str | None, args: tuple[object, ...]) -> Entry:
    """What torchrun's entry point and arguments start. Raises ConfigError for a function."""
    rest = tuple(str(argument) for argument in args)
    if entrypoint is run_script_path:
        return Entry("script", rest)
    if not isinstance(entrypoint, str):
        raise ConfigError("leto starts scripts, modules and programs, not functions; use torchrun or `leto run`")
    if entrypoint == sys.executable and rest[:1] == ("-u",):
        if rest[1:2] == ("-m",):
            return Entry("module", rest[2:])
        return Entry("script", rest[1:])
    return Entry("exec", (entrypoint, *rest))


class RunDirectory:
    """The directory of a run, locked for as long as this object is open.

    Args:
        path: of it; made when it is missing.
        shared: with the agents of other nodes of the job. `first` says that none of them has it open.

    Raises ConfigError when it cannot be written, or another job uses it.
    """

    def __init__(self, path: str, *, shared: bool = False) -> None:
        self.first = True
        self.path = str(Path(path).absolute())
        hint = "choose another one with --rdzv-conf run_dir=PATH"
        try:
            Path(self.path).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(Path(self.path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"the run directory {self.path} cannot be written: {error.strerror}; {hint}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not shared:
                os.close(self._lock)
                raise ConfigError(f"another job is using the run directory {self.path}; {hint}") from None
            self.first = False
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # the first one does not keep it exclusive for long
        self._shared = shared

    def let_others(self) -> None:
        """What only the first one may do is done."""
        if self._shared:
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self._lock)
