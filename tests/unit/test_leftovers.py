"""`leto clean`: what is of dead agents is listed and removed, what is of living ones is not."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from leto_elastic.cli import commands
from leto_elastic.coordinator import embedded
from leto_elastic.launch import leftovers
from leto_elastic.launch.leftovers import Leftover, find, remove
from leto_elastic.launch.retention import Retention

LATER = 1000.0


def old(path: Path) -> None:
    """As if nothing had changed for long."""
    for entry in (*path.rglob("*"), path):
        os.utime(entry, (entry.stat().st_atime - LATER,) * 2)


def state(base: Path, run_id: str) -> Retention:
    """A state that its agent has made, and still has."""
    made = Retention(str(base), run_id, 1, 1.0)
    assert made.take() is None
    os.ftruncate(fd := made.make(0, "weights"), 4096)
    os.pwrite(fd, b"x" * 4096, 0)
    os.close(fd)
    return made


def listener(path: Path) -> socket.socket:
    path.mkdir(mode=0o700)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(str(path / "agent"))
    sock.listen()
    return sock


def paths(found: list[Leftover]) -> list[str]:
    return [Path(leftover.path).name for leftover in found]


def test_a_state_is_left_when_its_lock_is_free(tmp_path: Path) -> None:
    living, dead = state(tmp_path, "living"), state(tmp_path, "dead")
    dead.close(keep=True)
    (left,) = find([tmp_path], [])
    assert (left.kind, left.run_id, left.path) == ("state", "dead", str(dead.path))
    assert left.bytes >= 4096
    assert remove(left)
    assert not dead.path.exists()
    assert living.path.exists()
    living.close(keep=False)


def test_what_has_come_alive_since_it_was_listed_stays(tmp_path: Path) -> None:
    state(tmp_path, "a").close(keep=True)
    (left,) = find([tmp_path], [])
    again = Retention(str(tmp_path), "a", 1, 1.0)
    assert not remove(left)
    again.close(keep=False)


def test_a_state_that_is_just_being_made_is_not_left(tmp_path: Path) -> None:
    path = tmp_path / "leto-run-0-abc"
    path.mkdir(mode=0o700)
    assert find([tmp_path], []) == []
    old(path)
    assert paths(find([tmp_path], [])) == ["leto-run-0-abc"]


def test_sockets_that_nobody_listens_on(tmp_path: Path) -> None:
    with listener(tmp_path / "leto-live"), listener(tmp_path / "leto-dead"):
        for path in tmp_path.iterdir():
            old(path)
        assert find([], [tmp_path]) == []
    other = tmp_path / "leto-of-somebody"
    other.mkdir()
    (other / "data").write_text("precious")
    old(other)
    assert paths(find([], [tmp_path])) == ["leto-dead", "leto-live"]
    assert all(remove(leftover) for leftover in find([], [tmp_path]))
    assert os.listdir(tmp_path) == ["leto-of-somebody"]  # noqa: PTH208


def test_directories_of_etcd(tmp_path: Path) -> None:
    for name in ("dead", "living"):
        (tmp_path / f"{embedded.PREFIX}{name}").mkdir()
    fd = embedded._lock(tmp_path / f"{embedded.PREFIX}living")
    assert fd is not None
    for path in tmp_path.iterdir():
        old(path)
    (left,) = find([], [tmp_path])
    assert (left.kind, Path(left.path).name) == ("etcd", f"{embedded.PREFIX}dead")
    assert remove(left)
    os.close(fd)


def run(*args: str) -> Result:
    return CliRunner().invoke(commands, ["clean", *args])


def test_the_command_lists_and_only_removes_when_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    monkeypatch.setattr(leftovers, "_SOCKETS", "no-such-prefix")
    monkeypatch.setattr(embedded, "PREFIX", "no-such-prefix")
    dead = state(tmp_path, "my run")
    dead.close(keep=True)
    option = f"--dir={tmp_path}"
    listed = run(option)
    assert listed.exit_code == 0
    assert listed.stdout.splitlines()[0].split() == ["kind", "run", "id", "MiB", "age", "path"]
    assert "my run" in listed.stdout
    assert dead.path.exists()
    (entry,) = json.loads(run(option, "--json").stdout)
    assert entry["run_id"] == "my run"
    assert run(option, "--yes").exit_code == 0
    assert not dead.path.exists()
    assert "nothing is left" in run(option).stdout
