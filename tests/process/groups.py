"""A control group with a limit for the memory of a test's job, v1 or v2, where this machine allows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

_ROOT = Path("/sys/fs/cgroup")

JOIN = ("/bin/sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"')
"""Command: enter the group that follows, and become the command after that."""


@contextmanager
def limited(size: int) -> Iterator[Path]:
    """The directory of a group with a limit of `size` bytes; skips the test where none can be made."""
    path = _own() / f"leto-test-{uuid4().hex[:8]}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (path / name).exists():
                (path / name).write_text(str(size))
                break
        else:
            pytest.skip(f"{path.parent} has no memory controller")
        yield path
    finally:
        path.rmdir()


def _own() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/")
        if controllers == "" and (_ROOT / "cgroup.controllers").exists():
            return _ROOT / path.lstrip("/")
    pytest.skip("no memory controller is mounted")
