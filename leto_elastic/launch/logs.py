"""Where the output of workers goes: torchrun's own `LogsSpecs` and `TailLog`, and files for shadows.

`LogsSpecs.reify` is called once per start of the whole group and never for a repair: with the same restart count it
would delete the logs of the survivors. A trainer's streams are opened for appending and kept, so the process that takes
a rank over writes on where the one before it stopped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing.api import LogsSpecs
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class Logs:
    """The streams of one start of the group.

    Args:
        specs: torchrun's.
        name: prefix of teed lines, as torchrun's role.
        envs: the environments of the workers by local rank; `TORCHELASTIC_ERROR_FILE` is added to each.
        prefixes: prefix of teed lines by local rank, or None for torchrun's default.
        filters: substrings of the lines of stdout and of stderr to collect into one file each.
    """

    def __init__(
        self,
        specs: LogsSpecs,
        name: str,
        envs: dict[int, dict[str, str]],
        prefixes: dict[int, str] | None,
        filters: tuple[list[str] | None, list[str] | None],
    ) -> None:
        self._dest = specs.reify(envs)
        self._streams: dict[int, tuple[int, int]] = {}
        for rank in envs:
            out = _open(self._dest.stdouts[rank], sys.stdout, 1)
            self._streams[rank] = (out, _open(self._dest.stderrs[rank], sys.stderr, 2))
        self._files: list[TextIO] = []
        tees = ((self._dest.tee_stdouts, sys.stdout), (self._dest.tee_stderrs, sys.stderr))
        self._tails = [TailLog(name, tee, console, prefixes) for tee, console in tees]
        collected = (self._dest.filtered_stdout, self._dest.filtered_stderr)
        for (tee, _), path, needles in zip(tees, collected, filters, strict=True):
            if needles:
                self._tails.append(self._filter(name, tee, path, needles, prefixes))

    def _filter(
        self, name: str, tee: dict[int, str], path: str, needles: list[str], prefixes: dict[int, str] | None
    ) -> TailLog:
        file = open(path, "w", errors="replace", buffering=1)  # noqa: PTH123, SIM115  (closed by `close`)
        self._files.append(file)
        return TailLog(
            name, tee, file, prefixes, log_line_filter=lambda line: any(needle in line for needle in needles)
        )

    def start(self) -> None:
        for tail in self._tails:
            tail.start()

    def streams(self, rank: int) -> tuple[int, int]:
        """Descriptors of the trainer's stdout and stderr; they stay ours."""
        return self._streams[rank]

    def error_file(self, rank: int) -> str:
        return self._dest.error_files[rank]

    def forget_error(self, rank: int) -> None:
        """Remove the error file of a failure that was dealt with, so that it is not blamed for the next one."""
        path = self.error_file(rank)
        if path and path != os.devnull:
            Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Print what is still to be printed; close everything."""
        for tail in self._tails:
            tail.stop()
        for streams in self._streams.values():
            for fd in streams:
                os.close(fd)
        for file in self._files:
            file.close()


def _open(path: str, console: TextIO, fallback: int) -> int:
    if path:
        return os.open(path, _APPEND, 0o666)
    console.flush()
    return os.dup(fallback)


def open_shadow_log(logs: str, slot: int, number: int) -> int:
    """The log of the `number`-th shadow of a slot, `<logs>/shadow.<slot>.<number>.log`."""
    directory = Path(logs)
    directory.mkdir(exist_ok=True)
    return os.open(directory / f"shadow.{slot}.{number}.log", _APPEND | os.O_TRUNC, 0o666)
