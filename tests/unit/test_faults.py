"""Fault plans: read strictly, fired once per job, and real when they fire."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leto_elastic.errors import ConfigError
from leto_elastic.testing import Fault, Faults, InjectedFault, install, parse, point, prepare


def test_a_plan_of_several_faults() -> None:
    text = "kill rank=2 step=5 phase=update chunk=1; exit phase=compute rank=1 step=9 ;; stop rank=0 phase=rebuild;"
    assert parse(text) == (
        Fault(number=0, kind="kill", rank=2, phase="update", step=5, chunk=1),
        Fault(number=1, kind="exit", rank=1, phase="compute", step=9, chunk=None),
        Fault(number=2, kind="stop", rank=0, phase="rebuild", step=None, chunk=None),
    )


@pytest.mark.parametrize("text", ["", " ", ";", " ; "])
def test_no_plan(text: str) -> None:
    assert parse(text) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("murder rank=1 step=1 phase=vote", ["'murder' is no kind", "kill, exit, raise, segv, stop"]),
        ("kill", ["rank= is missing"]),
        ("kill rank=1", ["phase= is missing"]),
        ("kill rank=1 phase=vote", ["phase=vote needs step="]),
        ("kill rank=one step=1 phase=vote", ["rank=one, allowed is a number"]),
        ("kill rank=-1 step=1 phase=vote", ["rank=-1"]),
        ("kill rank=1 step=² phase=vote", ["step=²"]),
        ("kill rank=1 step=1 phase=vote step=2", ["step= is there twice"]),
        ("kill rank=1 step=1 stage=vote", ["'stage=vote' is not understood", "rank=, step=, phase=, chunk="]),
        ("kill rank=1 step=1 phase=vote chunk=1", ["chunk= is for phase=update, not for phase=vote"]),
        ("kill rank=1 step=1 phase=update chunk=first", ["chunk=first", "mid or last"]),
        ("kill rank=1 step=1 phase=updat", ["did you mean update?"]),
        ("kill rank=1 phase=a/b", ["phase=a/b", "compute, backward, vote, update, commit, rebuild, attach"]),
        ("kill rank=4 step=1 phase=vote", ["the ranks of this job are 0 to 3"]),
    ],
)
def test_a_mistake_is_pointed_at(text: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(f"stop rank=0 phase=attach; {text}", world_size=4)
    assert str(error.value).startswith(f"LETO_FAULTS, fault 2 ({text!r}): ")
    for part in said:
        assert part in str(error.value)


class Recorder:
    """Faults of kind `raise` and where they fired."""

    def __init__(self, run_dir: Path, text: str, rank: int = 1) -> None:
        self.faults = Faults.from_env(run_dir, rank, {"LETO_FAULTS": text})

    def fires(self, phase: str, step: int | None = None, chunk: int | None = None, chunks: int | None = None) -> bool:
        try:
            self.faults.at(phase, step, chunk, chunks)
        except InjectedFault:
            return True
        return False


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "faults").mkdir()
    return tmp_path


def test_a_fault_fires_at_its_point_only(run_dir: Path) -> None:
    recorder = Recorder(run_dir, "raise rank=1 step=5 phase=backward")
    assert not recorder.fires("backward", 4)
    assert not recorder.fires("compute", 5)
    assert not Recorder(run_dir, "raise rank=1 step=5 phase=backward", rank=0).fires("backward", 5)
    assert recorder.fires("backward", 5)


def test_a_fault_fires_once_per_job_not_once_per_process(run_dir: Path) -> None:
    text = "raise rank=1 step=5 phase=vote; raise rank=1 step=5 phase=vote"
    assert Recorder(run_dir, text).fires("vote", 5)
    replacement = Recorder(run_dir, text)
    assert replacement.fires("vote", 5), "the second one is another fault"
    assert not replacement.fires("vote", 5)
    assert not Recorder(run_dir, text).fires("vote", 5)


@pytest.mark.parametrize(
    ("chunk", "chunks", "where"),
    [
        ("", 4, 0),
        (" chunk=0", 4, 0),
        (" chunk=3", 4, 3),
        (" chunk=mid", 4, 2),
        (" chunk=mid", 1, 0),
        (" chunk=last", 4, 3),
    ],
)
def test_the_chunk_of_an_update(run_dir: Path, chunk: str, chunks: int, where: int) -> None:
    recorder = Recorder(run_dir, f"raise rank=1 step=5 phase=update{chunk}")
    assert [i for i in range(chunks) if recorder.fires("update", 5, i, chunks)] == [where]


def test_a_chunk_that_does_not_exist_is_an_error_not_a_fault_that_never_fires(run_dir: Path) -> None:
    faults = Faults.from_env(run_dir, 1, {"LETO_FAULTS": "raise rank=1 step=5 phase=update chunk=9"})
    with pytest.raises(ConfigError, match="has 4 chunks"):
        faults.at("update", 5, 0, 4)


def test_without_a_step_any_step_will_do_and_the_last_one_passed_is_known(run_dir: Path) -> None:
    recorder = Recorder(run_dir, "raise rank=1 phase=rebuild; raise rank=1 step=7 phase=after_eval")
    assert recorder.fires("rebuild")
    assert not recorder.fires("after_eval")
    recorder.faults.at("commit", 7)
    assert recorder.fires("after_eval")


def test_points_of_the_script(run_dir: Path) -> None:
    point("mine")
    faults = Faults.from_env(run_dir, 1, {"LETO_FAULTS": "raise rank=1 phase=mine"})
    point("mine")  # a shadow: not installed yet
    install(faults)
    try:
        with pytest.raises(InjectedFault, match="fault 1 of LETO_FAULTS"):
            point("mine")
        point("mine")
    finally:
        install(None)


def test_prepare_forgets_an_earlier_job_and_checks_the_plan(tmp_path: Path) -> None:
    plan = {"LETO_FAULTS": "raise rank=1 step=5 phase=vote"}
    assert prepare(tmp_path / "run", 4, plan) == parse(plan["LETO_FAULTS"])
    assert Recorder(tmp_path / "run", plan["LETO_FAULTS"]).fires("vote", 5)
    prepare(tmp_path / "run", 4, plan)
    assert Recorder(tmp_path / "run", plan["LETO_FAULTS"]).fires("vote", 5)
    assert prepare(tmp_path / "run", 4, {}) == ()
    assert not (tmp_path / "run" / "faults").exists()
    with pytest.raises(ConfigError, match="0 to 1"):
        prepare(tmp_path / "run", 2, {"LETO_FAULTS": "kill rank=2 step=1 phase=vote"})


PROCESS = """
import sys
from leto_elastic.testing import Faults
faults = Faults.from_env(sys.argv[1], 1)
faults.on_fire = lambda: print("last words", flush=True)
faults.at("commit", 5)
print("alive", flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("kill", -signal.SIGKILL, "last words"),
        ("exit", 17, "last words"),
        ("segv", -signal.SIGSEGV, "last words"),
        ("raise", 1, "last words"),
        ("stop", 0, "alive"),
    ],
)
def test_the_kinds_are_real(run_dir: Path, kind: str, code: int, said: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", PROCESS, str(run_dir)],
        env={**os.environ, "LETO_FAULTS": f"{kind} rank=1 step=5 phase=commit"},
        cwd=run_dir,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if kind == "stop":
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert os.WSTOPSIG(status) == signal.SIGSTOP
        process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.strip()) == (code, said)
    assert [file.name for file in run_dir.iterdir()] == ["faults"], "no core file"
