"""events.jsonl and the lines on the terminal."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from leto_elastic.errors import ConfigError
from leto_elastic.observe import events, report
from leto_elastic.observe.events import EVENTS, RECOVERY_PHASES, EventLog, complaints, read
from leto_elastic.recovery.policy import FailureClass

RECOVERY: dict[str, object] = {
    "time": 1.0,
    "event": "recovery",
    "epoch": 3,
    "cause": "signal",
    "rank": 2,
    "ranks": [2],
    "action": "promote",
    "resolution": "forward",
    "lost_steps": 0,
    "stall_ms": 141.6,
    "phases_ms": {name: float(i) for i, name in enumerate(RECOVERY_PHASES)},
}


def test_an_event_is_one_json_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a" / "b" / "events.jsonl", clock=lambda: 12.5)
    log.write("worker_started", role="trainer", rank=0, slot=0, pid=42)
    log.write("failure", cause=FailureClass.SIGNAL, reason="two\nlines", chunk=None)
    lines = log.path.read_text().splitlines()
    assert json.loads(lines[0]) == {
        "time": 12.5, "event": "worker_started", "role": "trainer", "rank": 0, "slot": 0, "pid": 42,
    }  # fmt: skip
    assert json.loads(lines[1]) == {
        "time": 12.5, "event": "failure", "cause": "signal", "reason": "two\nlines", "chunk": None,
    }  # fmt: skip
    assert list(read(log.path)) == [json.loads(line) for line in lines]
    log.close()
    log.close()
    log.write("run_finished")
    assert len(log.path.read_text().splitlines()) == 2


def test_an_older_file_is_renamed_aside(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for number in range(3):
        log = EventLog(path)
        log.write(f"run{number}")
        log.close()
    names = {file.name: next(read(file))["event"] for file in tmp_path.iterdir()}
    assert names == {"events.1.jsonl": "run0", "events.2.jsonl": "run1", "events.jsonl": "run2"}


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    def write(writer: int) -> None:
        for number in range(50):
            log.write("x", writer=writer, number=number, padding="p" * 5000)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert len({(e["writer"], e["number"]) for e in read(log.path)}) == 200


def test_another_writer_of_the_same_file_is_not_overwritten(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("a")
    with log.path.open("ab") as other:
        other.write(b'{"event": "b"}\n')
    log.write("c")
    log.close()
    assert [event["event"] for event in read(log.path)] == ["a", "b", "c"]


def test_a_line_under_way_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n{"event": "b"')
    assert list(read(path)) == [{"event": "a"}]


def test_the_descriptor_is_not_inherited(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    mine = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and fd.readlink() == log.path]
    assert [os.get_inheritable(int(fd.name)) for fd in mine] == [False]
    log.close()


def test_a_run_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: .*--rdzv-conf run_dir=PATH"):
        EventLog(tmp_path / "file" / "events.jsonl")


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    full = os.open("/dev/full", os.O_WRONLY)
    assert log._fd is not None
    os.dup2(full, log._fd)
    os.close(full)
    log.write("a")
    log.write("b")
    log.close()
    assert log.lost == 2
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_well_formed_event_has_no_complaints() -> None:
    assert complaints(RECOVERY) == []


@pytest.mark.parametrize("name", EVENTS)
def test_a_missing_field_is_complained_about(name: str) -> None:
    full: dict[str, object] = {**RECOVERY, **dict.fromkeys(EVENTS[name], 0), "event": name}
    if name == "recovery":
        full = RECOVERY
    assert complaints(full) == []
    for field in EVENTS[name] | {"time"}:
        without = {key: value for key, value in full.items() if key != field}
        assert f"{name}: {field} is missing" in complaints(without)


def test_wrong_shapes_are_complained_about() -> None:
    assert complaints({"time": 1, "event": "recovred"}) == ["unknown event 'recovred'"]
    assert complaints({**RECOVERY, "resolution": "sideways"}) == ["recovery: resolution is 'sideways'"]
    assert "phases_ms" in complaints({**RECOVERY, "phases_ms": {"plan": 1}})[0]


def test_the_line_of_a_recovery() -> None:
    assert report.line(RECOVERY) == (
        "leto: recovered rank 2 (signal) by promote, rolled forward, 0 steps lost, stalled 142 ms "
        "(detect 0, plan 1, abort 2, rebuild 3, attach 4, resolve 5, first_step 6), epoch 3"
    )
    several = {**RECOVERY, "ranks": [1, 3], "resolution": "rerun", "phases_ms": {}, "lost_steps": 1}
    assert report.line(several) == (
        "leto: recovered ranks 1, 3 (signal) by promote, step run again, 1 step lost, stalled 142 ms, epoch 3"
    )


def test_other_lines() -> None:
    assert report.line({"event": "failure", "rank": 1, "pid": 7, "cause": "exit", "step": 3, "phase": "vote"}) == (
        "leto: rank 1 (pid 7) failed: exit at step 3, vote"
    )
    hang = {"event": "hang", "rank": 2, "pid": 7, "step": 5, "reason": "no Python ran in it", "stacks": "run/x.txt"}
    assert report.line(hang) == (
        "leto: rank 2 (pid 7) hangs at step 5: no Python ran in it; its stacks are in run/x.txt"
    )
    unfit = report.line({"event": "shadow_unfit", "slot": 1, "rank": 5, "reason": "shapes differ"})
    assert unfit is not None
    assert unfit.startswith("leto: the shadow of slot 1 (rank 5) cannot stand in: shapes differ; ")
    assert report.line({"event": "restart", "reason": "rank 0 failed"}) == (
        "leto: restarting all workers: rank 0 failed"
    )
    assert report.line({"event": "worker_started"}) is None


def test_every_line_is_of_a_known_event_and_survives_missing_fields() -> None:
    for name in events.EVENTS:
        text = report.line({"event": name})
        assert text is None or (text.startswith("leto: ") and "\n" not in text)
    assert report._WRITERS.keys() <= events.EVENTS.keys()
