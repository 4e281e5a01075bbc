"""The built wheel in a virtual environment of its own, plain `torchrun --rdzv-backend=leto`.

The environment sees, of everything installed here, only what the wheel declares to need (by links, which saves the
download of torch). So a dependency that is used and not declared fails here, and so does a plugin that does not
register.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
os.write(1, f"rank {dist.get_rank()} sum {ones.item()}\\n".encode())
dist.destroy_process_group()
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def needed(requirements: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that these requirements come to, with all that those need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            distribution = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # needed on other systems, or by other builds of torch
        assert requirement.specifier.contains(distribution.version, prereleases=True), requirement
        name = distribution.metadata["Name"].lower()
        if name not in found:
            found[name] = distribution
            todo += [(Requirement(text), e) for text in distribution.requires or [] for e in ("", *requirement.extras)]
    return found


def link(distributions: list[importlib.metadata.Distribution], directory: Path) -> None:
    for distribution in distributions:
        for file in distribution.files or []:
            top = file.parts[0]
            source = Path(str(distribution.locate_file(top)))
            if top not in ("..", "__pycache__") and source.exists() and not (directory / top).exists():
                (directory / top).symlink_to(source)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("leto_elastic", "configs", "pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        path = ROOT / name
        if path.is_dir():
            copy_tree(path, source / name)
        else:
            (source / name).write_bytes(path.read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", source / "dist", source, cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def copy_tree(source: Path, target: Path) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                copy_tree(entry, target / entry.name)
        else:
            (target / entry.name).write_bytes(entry.read_bytes())


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its `bin` directory."""
    home = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", home, cwd=home)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).stdout.strip())
    requires = importlib.metadata.PathDistribution(zipfile.Path(wheel, f"{dist_info(wheel)}/")).requires or []
    link(list(needed(requires).values()), site)
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=home)
    return home / "bin"


def dist_info(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)


def test_wheel_holds_the_package_and_the_policy_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "leto_elastic/configs/default.yaml" in names
    assert "leto_elastic/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"leto_elastic", dist_info(wheel)}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "leto_elastic").rglob("*.py")}
    assert ours <= set(names), "every module is in it"


def test_it_is_the_installed_package_that_runs(venv: Path, tmp_path: Path) -> None:
    shown = run(venv / "python", "-c", "import leto_elastic; print(leto_elastic.__file__)", cwd=tmp_path).stdout
    assert shown.startswith(str(venv.parent))
    version = run(venv / "leto", "--version", cwd=tmp_path).stdout
    assert version == f"leto, version {importlib.metadata.version('leto-elastic')}\n"


@pytest.mark.parametrize(
    "command",
    [["python", "-m", "torch.distributed.run", "--rdzv-backend=leto"], ["leto", "run"]],
    ids=["torchrun", "leto run"],
)
def test_plain_script(venv: Path, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(venv / command[0], *command[1:], "--nproc-per-node=2", "script.py", cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["rank 0 sum 2.0", "rank 1 sum 2.0"]
    assert "Exception while registering" not in done.stderr
    events = [json.loads(line) for line in (tmp_path / ".leto" / "none" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["run_started", "worker_started", "worker_started", "run_finished"]
