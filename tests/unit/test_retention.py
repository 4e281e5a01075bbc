"""The files of a run's state: taken up when they are whole and ours, told and left alone when they are not."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest

from leto_elastic.errors import ConfigError, StateError
from leto_elastic.launch.actions import Action, Emit, HandOver, Publish, Report, Send, Spawn
from leto_elastic.launch.job import Job
from leto_elastic.launch.retention import Found, Retention
from leto_elastic.launch.segments import Memory, Segments
from leto_elastic.launch.slots import Blob
from leto_elastic.launch.world import PlanView
from leto_elastic.protect.checksum import checksum_at
from leto_elastic.state.header import Phase, Position
from leto_elastic.state.layout import encode
from leto_elastic.state.retained import Retained
from leto_elastic.state.transaction import Transaction
from leto_elastic.wire import Committed, Promote, StoreAddress
from tests.unit.test_launch_job import FakeHeld, of
from tests.unit.test_transaction import OPTIMIZERS, build, gradients, groups

SLOTS = 2
STORE = StoreAddress("127.0.0.1", 7)


def blob(data: bytes) -> Blob:
    fd = os.memfd_create("blob")
    os.write(fd, data)
    return Blob(fd, len(data))


def train(shelf: Retention, slot: int, steps: int, *, publish: bool = True) -> None:
    """What a trainer and its agent leave behind after so many steps, as if both had been killed."""
    held = Segments(slot, Memory(), shelf.make)
    model = build()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    retained = Retained.create(
        model, optimizer, held.alloc, elementwise=None, extras_bytes=100, chunk_bytes=16384, checksum=checksum_at
    )
    retained.extras.write(0, b"X(0)")
    retained.header.position = Position(0, Phase.COMPUTE)
    transaction = Transaction(retained, held.alloc, lambda: None, None)
    for step in range(steps):
        gradients(model, step, False)
        transaction.save_gradients()
        retained.extras.write(step + 1, b"vote")
        retained.header.position = Position(step, Phase.VOTE, slot=step % 3)
        fresh = transaction.run()
        if fresh:
            retained.settle(fresh, step + 1, held.alloc, 16384, buckets=False)
        retained.extras.write((step + 1) % 3, f"X({step + 1})".encode())
        retained.header.position = Position(step + 1, Phase.COMPUTE, slot=(step + 1) % 3)
        if step == 0 and publish:
            for kind, data in (("record", b"setup"), ("manifest", encode(retained.manifest))):
                kept = blob(data)
                shelf.keep(slot, kind, kept)
                os.close(kept.fd)
            retained.header.layout = retained.manifest.version
    held.clear()


def left(base: Path, *steps: int, publish: bool = True, run_id: str = "run") -> Retention:
    """The directory after agent and trainers are gone, opened by another agent."""
    shelf = Retention(str(base), run_id, SLOTS, 0.0)
    assert shelf.take() is None
    for slot, count in enumerate(steps):
        train(shelf, slot, count, publish=publish)
    shelf.close(keep=True)
    return Retention(str(base), run_id, SLOTS, 0.0)


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def drop(found: Found | None) -> None:
    assert found is not None
    for fd in [fd for fds in found.segments for fd in fds.values()]:
        os.close(fd)
    for one in (*found.records, *found.manifests):
        os.close(one.fd)


def test_it_is_taken_up_whole(tmp_path: Path) -> None:
    shelf = left(tmp_path, 5, 4)
    with pytest.raises(StateError, match="which no failure can leave behind"):
        shelf.take()  # one rank is a whole step ahead: nothing leads there
    shelf.close(keep=False)
    shelf = left(tmp_path, 5, 5)
    found = shelf.take()
    assert found is not None
    assert (found.step, found.pid) == (5, os.getpid())
    assert set(found.segments[1]) >= {"header", "weights", "optim", "grads", "extras", "undo"}
    assert os.pread(found.records[0].fd, 99, 0) == b"setup"
    drop(found)
    shelf.close(keep=False)
    assert not shelf.path.exists()


def test_a_job_begins_with_it(tmp_path: Path) -> None:
    shelf = left(tmp_path, 3, 3)
    found = shelf.take()
    assert found is not None
    held = [Segments(slot, Memory()) for slot in range(SLOTS)]
    job = Job(held, shadows=True, restarts_left=0)
    actions = found.into(job, held, STORE)
    assert isinstance(actions[0], Emit)
    assert actions[0].fields["step"] == 3
    assert actions[1:] == [Publish(0), Spawn(0, "respawn"), Publish(1), Spawn(1, "respawn")]
    assert job.protected
    assert job.newest() == 3
    shelf.end(job, succeeded=False)
    assert shelf.path.exists()
    for segments in held:
        segments.clear()
    for one in (*found.records, *found.manifests):
        os.close(one.fd)


@pytest.mark.parametrize(
    ("name", "where", "says"),
    [
        ("1.weights.segment", 100, "slot 1: .* does not match its checksum"),
        ("0.optim.segment", 5000, "slot 0: .* does not match its checksum"),
        ("0.manifest", 20, "0.manifest does not match its checksum"),
        ("1.record", 12, "1.record does not match its checksum"),
        ("owner", 13, "owner does not match its checksum"),
    ],
)
def test_a_bit_that_has_flipped_is_found(name: str, where: int, says: str, tmp_path: Path) -> None:
    shelf = left(tmp_path, 4, 4)
    flip(shelf.path / name, where)
    with pytest.raises(StateError, match=says) as refused:
        shelf.take()
    assert "leto clean --yes" in str(refused.value)
    del refused  # with it, the mappings of what was looked at
    gc.collect()
    job = Job([Segments(slot, Memory()) for slot in range(SLOTS)], shadows=True, restarts_left=0)
    shelf.end(job, succeeded=False)
    assert (shelf.path / name).exists(), "what was refused is not removed"
    flip(shelf.path / name, where)
    shelf = Retention(str(tmp_path), "run", SLOTS, 0.0)
    drop(shelf.take())
    shelf.close(keep=False)


def test_something_missing(tmp_path: Path) -> None:
    shelf = left(tmp_path, 4, 4)
    (shelf.path / "1.manifest").unlink()
    with pytest.raises(StateError, match=r"of slots \[1\] something is missing"):
        shelf.take()
    shelf.close(keep=False)


def test_a_layout_that_had_not_reached_the_files(tmp_path: Path) -> None:
    shelf = left(tmp_path, 4, 4)
    with (shelf.path / "0.header.segment").open("r+b") as file:
        file.seek(10 * 8)
        file.write((2).to_bytes(8, "little"))
    with pytest.raises(StateError, match="its layout has changed to version 2, version 1 is known"):
        shelf.take()
    shelf.close(keep=False)


def test_nothing_to_go_on_from_before_the_first_commit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shelf = left(tmp_path, 1, 0, publish=False)
    assert shelf.take() is None
    assert "beginning anew" in capfd.readouterr().err
    assert sorted(entry.name for entry in shelf.path.iterdir()) == ["lock", "owner"]
    shelf.close(keep=False)


def test_another_number_of_ranks(tmp_path: Path) -> None:
    left(tmp_path, 4, 4).close(keep=True)
    shelf = Retention(str(tmp_path), "run", 3, 0.0)
    with pytest.raises(StateError, match="it is of a job of 2 ranks, this one has 3"):
        shelf.take()
    shelf.close(keep=False)


def test_a_process_that_still_writes_to_it(tmp_path: Path) -> None:
    shelf = left(tmp_path, 4, 4)
    with (shelf.path / "0.weights.segment").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    with pytest.raises(StateError, match=r"still has 0.weights.segment open 0 s after"):
        shelf.take()
    mapped.close()
    drop(shelf.take())
    shelf.close(keep=False)


def test_it_has_one_owner(tmp_path: Path) -> None:
    mine = Retention(str(tmp_path), "run", SLOTS, 0.0)
    with pytest.raises(ConfigError, match="in use by another agent"):
        Retention(str(tmp_path), "run", SLOTS, 0.0)
    other = Retention(str(tmp_path), "other", SLOTS, 0.0)
    assert other.path != mine.path
    mine.close(keep=True)
    again = Retention(str(tmp_path), "run", SLOTS, 0.0)
    again.close(keep=True)
    again.path.chmod(0o755)
    with pytest.raises(ConfigError, match="only this user may enter"):
        Retention(str(tmp_path), "run", SLOTS, 0.0)
    other.close(keep=False)


def test_an_agent_that_ends_before_it_has_looked_leaves_everything(tmp_path: Path) -> None:
    shelf = left(tmp_path, 4, 4)
    shelf.end(Job([Segments(0, Memory())], shadows=True, restarts_left=0), succeeded=False)
    assert (shelf.path / "1.weights.segment").exists()


class Resumed:
    """A job that goes on from the state of another agent, its processes started but not ready."""

    def __init__(self) -> None:
        self.job = Job([FakeHeld(), FakeHeld()], shadows=True, restarts_left=0)
        for slot in self.job.slots:
            slot.record, slot.manifest = Blob(1, 1), Blob(2, 1, version=4)
        self.job.resume(STORE, 1.0)
        for slot in (0, 1):
            self.start(slot, slot)

    def start(self, key: int, slot: int) -> None:
        self.job.started(key, slot, "respawn", 100 + key)
        self.job.greeted(key)

    def ready(self, key: int) -> list[Action]:
        assert of(Send, self.job.rehearsed(key))
        return self.job.ready(key, 2.0)


def test_all_are_promoted_together_into_the_first_epoch() -> None:
    told = Resumed()
    assert of(HandOver, told.ready(0)) == []
    handed = of(HandOver, told.ready(1))
    assert handed == [HandOver(0, Promote(0, 4, STORE)), HandOver(1, Promote(0, 4, STORE))]
    for key in (0, 1):
        actions = told.job.committed(key, Committed(0, 5, "rerun", {}), 3.0)
    (event,) = of(Emit, actions)
    assert (event.event, event.fields["ranks"], event.fields["action"]) == ("recovery", [0, 1], "adopt")
    assert of(Spawn, actions) == [Spawn(0, "shadow"), Spawn(1, "shadow")]


def test_one_that_dies_on_the_way_is_a_failure_of_its_rank() -> None:
    told = Resumed()
    told.ready(0)
    (report,) = of(Report, told.job.exited(1, -9, 2.0))
    assert (report.epoch, report.death.rank) == (0, 1)
    plan = PlanView(1, "repair", {1: "respawn"}, STORE, "")
    assert of(Spawn, told.job.plan(plan, 3.0)) == [Spawn(1, "respawn")]
    told.start(2, 1)
    assert [action.message.epoch for action in of(HandOver, told.ready(2))] == [1, 1]
