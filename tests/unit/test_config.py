"""Policy files: what differs is enough, and a mistake is pointed at."""

from __future__ import annotations

import os
import typing
from pathlib import Path

import msgspec
import pytest

from leto_elastic.errors import ConfigError
from leto_elastic.recovery.config import load_policy
from leto_elastic.recovery.policy import Action, FailureClass, Policy, Section


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    return tmp_path / "policy.yaml"


def refusal(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_policy(str(path))
    assert "\n" not in str(error.value), "one line"
    return str(error.value)


def test_the_shipped_file_says_what_the_code_says() -> None:
    assert load_policy(None) == Policy()


def test_the_shipped_file_names_every_key() -> None:
    """So that it is the documentation: whatever may be set is there to be read."""
    from importlib.resources import files

    import yaml

    def keys(tree: object, prefix: str = "") -> set[str]:
        if not isinstance(tree, dict):
            return {prefix}
        return {key for name, below in tree.items() for key in keys(below, f"{prefix}.{name}")}

    shipped = yaml.safe_load(files("leto_elastic.configs").joinpath("default.yaml").read_text(encoding="utf-8"))
    assert keys(shipped) == keys(msgspec.to_builtins(Policy()))
    assert "protect.global.parity" in {name.removeprefix(".") for name in keys(shipped)}


def test_a_file_names_only_what_differs(policy_file: Path) -> None:
    policy_file.write_text(
        "limits:\n  per_window: {seconds: 5}\nclasses:\n  exit: [respawn, fail]\ncoordinator: {lease: 9}\n"
    )
    policy, default = load_policy(str(policy_file)), Policy()
    assert policy.limits.per_window.seconds == 5.0
    assert policy.limits.per_window.failures == default.limits.per_window.failures
    assert policy.classes[FailureClass.EXIT] == (Action.RESPAWN, Action.FAIL)
    assert policy.classes[FailureClass.SIGNAL] == default.classes[FailureClass.SIGNAL]
    assert policy.coordinator.lease == 9
    assert policy.deadlines == default.deadlines


def test_a_key_that_python_reserves_is_spelt_plainly_in_a_file(policy_file: Path) -> None:
    policy_file.write_text("protect: {global: {parity: 2}}\nclasses: {node: [fail]}\n")
    policy = load_policy(str(policy_file))
    assert (policy.protect.global_.parity, policy.protect.global_.every) == (2, 10)
    assert policy.classes[FailureClass.NODE] == (Action.FAIL,)
    assert Policy.decode(policy.encode()) == policy


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "limits: {}\n"])
def test_a_file_may_change_nothing(policy_file: Path, text: str) -> None:
    if text == "---\n":  # an explicit empty document is a null, not a mapping
        assert "the policy is nothing" in refusal(policy_file, text)
        return
    policy_file.write_text(text)
    assert load_policy(str(policy_file)) == Policy()


def test_torchruns_options_win_over_the_file(policy_file: Path) -> None:
    policy_file.write_text("deadlines: {shutdown: 7}\nlimits: {per_job: 5}\n")
    path = str(policy_file)
    assert load_policy(path).deadlines.shutdown == 7.0
    assert load_policy(path, max_restarts=0, shutdown_timeout=30).limits.per_job == 5
    assert load_policy(path, shutdown_timeout=30).deadlines.shutdown == 7.0, "30 is torchrun's default, not a wish"
    policy = load_policy(path, max_restarts=2, shutdown_timeout=3)
    assert (policy.limits.per_job, policy.deadlines.shutdown) == (2, 3.0)
    with pytest.raises(ConfigError, match=r"--shutdown-timeout: deadlines\.shutdown is -1, allowed is a number"):
        load_policy(path, shutdown_timeout=-1)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("limits:\n  per_stop: 3\n", 2, ["'per_stop' in limits", "per_step, per_window, per_job", "mean per_step?"]),
        ("deadline: {}\n", 1, ["'deadline' at top level", "mean deadlines?"]),
        ("classes:\n\n  oops: [fail]\n", 3, ["'oops' in classes", "exit, signal, exception"]),
        ("1: 2\n", 1, ["unknown key 1"]),
        ("? [a]\n: b\n", 1, ["unknown key ['a']"]),
        ("deadlines:\n  abort: -1\n", 2, ["deadlines.abort is -1", "a number of seconds above 0"]),
        ("deadlines:\n  abort: soon\n", 2, ["deadlines.abort is 'soon'", "a number of seconds"]),
        ("deadlines:\n  abort: yes\n", 2, ["deadlines.abort is true"]),
        ("deadlines:\n  abort:\n", 2, ["deadlines.abort is nothing"]),
        ("deadlines:\n  abort: .nan\n", 2, ["deadlines.abort is nan"]),
        ("deadlines:\n  abort: .inf\n", 2, ["deadlines.abort is inf"]),
        ("deadlines:\n  abort: 2020-13-45\n", 2, ["deadlines.abort cannot be read"]),
        ("limits:\n  per_window:\n    failures: 0\n", 3, ["limits.per_window.failures is 0", "at least 1"]),
        ("limits: 3\n", 1, ["limits is 3", "a mapping of per_step, per_window, per_job"]),
        ("shadow:\n  per_slot: 2\n", 2, ["shadow.per_slot is 2", "0 or 1"]),
        ("shadow:\n  rehearsals: 2\n", 2, ["shadow.rehearsals is 2", "from 3"]),
        ("state:\n  chunk_bytes: 16M\n", 2, ["state.chunk_bytes is '16M'", "from 65536"]),
        ("protect:\n  global_: {}\n", 2, ["'global_' in protect", "local, global, codec", "mean global?"]),
        ("protect:\n  global:\n    parity: 17\n", 3, ["protect.global.parity is 17", "from 0 (off) to 16"]),
        ("protect:\n  global:\n    every: 0\n", 3, ["protect.global.every is 0", "at least 1"]),
        ("protect:\n  global:\n    buffers: 3\n", 3, ["protect.global.buffers is 3", "1 or 2"]),
        ("protect:\n  global:\n    date: 2\n", 3, ["'date' in protect.global", "mean data?"]),
        ("protect:\n  global: off\n", 2, ["protect.global is false", "a mapping of data, parity, every, buffers"]),
        ("protect:\n  local: {parity: 2}\n", 2, ["protect.local.parity is 2", "0 (off) or 1"]),
        ("protect:\n  codec: isa-l\n", 2, ["protect.codec is 'isa-l'", "auto, isal, tables or reedsolo"]),
        ("protect:\n  max_fraction: 1.5\n", 2, ["protect.max_fraction is 1.5", "at most 1"]),
        ("deadlines:\n  meet: 0\n", 2, ["deadlines.meet is 0"]),
        ("deadlines:\n  replace: 1800\n", 2, ["replace (1800 s) must be below collective (1800 s)"]),
        ("deadlines:\n  restore: 2000\n", 2, ["restore (2000 s) must be below collective (1800 s)"]),
        ("classes:\n  node: [replace]\n", 2, ["classes.node is [replace]", "ends with fail"]),
        ("coordinator:\n  lease: 1.5\n", 2, ["coordinator.lease is 1.5", "whole number"]),
        (
            "classes:\n  exit: [shrink, fail]\n",
            2,
            ["classes.exit is ['shrink', 'fail']", "replace and fail"],
        ),
        ("classes:\n  exit: []\n", 2, ["classes.exit is []"]),
        ("classes:\n  exit: fail\n", 2, ["classes.exit is 'fail'", "a list"]),
        ("classes:\n  exit: [fail, promote]\n", 2, ["ends with fail"]),
        ("classes:\n  exit: [promote, promote, fail]\n", 2, ["each action once"]),
        ("limits: {}\nlimits: {}\n", 2, ["limits is there twice, first on line 1"]),
        ("a: [1\n", 2, ["not valid YAML"]),
        ("limits: {}\n\tshadow: {}\n", 2, ["not valid YAML"]),
        ("limits: &a {per_step: *a}\n", 1, ["not valid YAML", "recursive"]),
        ("limits: !!python/object/apply:os.getpid []\n", 1, ["not valid YAML", "python/object"]),
        ("limits:\n  per_step: !!python/name:os.system\n", 2, ["not valid YAML", "python/name"]),
        ("limits: {}\n---\nlimits: {}\n", 2, ["single document"]),
        ("- 1\n", 1, ["the policy is [1]", "a mapping of deadlines"]),
        ("limits:\n  per_step: 1\x00\n", 2, ["special characters"]),
        ("deadlines:\n  plan: 4\n  abort: 4\n", 3, ["abort (4 s) must be below plan (4 s)", "out of order"]),
        ("deadlines:\n  plan: 4\n", 2, ["abort (5 s) must be below plan (4 s)"]),
        ("deadlines:\n  collective: 100\n", 2, ["respawn (120 s) must be below collective (100 s)"]),
        (
            "deadlines: {abort: 0.1, plan: 0.5}\ncoordinator:\n  collect_ms: 500\n",
            3,
            ["coordinator.collect_ms (500 ms) must be below deadlines.plan (0.5 s)"],
        ),
    ],
)
def test_a_mistake_is_pointed_at(policy_file: Path, text: str, line: int, said: list[str]) -> None:
    message = refusal(policy_file, text)
    assert message.startswith(f"{policy_file}, line {line}: ")
    for part in said:
        assert part in message


def test_deep_nesting_is_refused(policy_file: Path) -> None:
    assert "nested too deeply" in refusal(policy_file, "[" * 500 + "]" * 500)


def test_a_huge_file_is_refused(policy_file: Path) -> None:
    assert "larger than" in refusal(policy_file, "#" * ((1 << 20) + 1))


def test_a_long_value_is_shortened(policy_file: Path) -> None:
    assert len(refusal(policy_file, f"limits: {{per_step: {'x' * 5000}}}")) < 400


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml cannot be read: No such file"):
        load_policy(str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_policy(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"limits: {}  # \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_policy(str(tmp_path / "latin.yaml"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(policy_file: Path) -> None:
    policy_file.touch(mode=0)
    with pytest.raises(ConfigError, match="Permission denied"):
        load_policy(str(policy_file))


def leaves(kind: type[Section]) -> typing.Iterator[tuple[str, object]]:
    for name, inner in typing.get_type_hints(kind, include_extras=True).items():
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from leaves(inner)
        else:
            yield f"{kind.__name__}.{name}", typing.get_args(inner)[1] if typing.get_origin(inner) is dict else inner


def test_every_value_says_what_it_may_be() -> None:
    """`load_policy` quotes it when the value found is something else."""
    for name, kind in leaves(Policy):
        described = [m.description for m in getattr(kind, "__metadata__", ()) if isinstance(m, msgspec.Meta)]
        assert described, f"{name} has no description"
        assert described[0], f"{name} has no description"
