"""Policy files: YAML in, a checked `Policy` out, and errors that point at the line.

The user's file is laid over `leto_elastic.configs/default.yaml`: mappings are merged key by key, lists and scalars
replace. Everything is read through `yaml.compose`, whose nodes keep their line, rather than `yaml.safe_load`, whose
result does not: a message such as "policy.yaml, line 7: deadlines.abort is -1, allowed is ..." needs it.
"""

from __future__ import annotations

import difflib
import importlib.resources
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from leto_elastic.errors import ConfigError
from leto_elastic.recovery.policy import FailureClass, Policy, PolicyError, Section

TORCHRUN_SHUTDOWN = 30
"""torchrun's own default of `--shutdown-timeout`, which it passes on whether or not the user gave the option."""

MAX_FILE_BYTES = 1 << 20

_DEFAULT_NAME = "default.yaml of leto_elastic"

_Tree = dict[str, object]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a key came from."""

    file: str  # or the command line option
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}, line {self.line}"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as SafeLoader reads it; no tag can make anything but plain data."""


def load_policy(path: str | None, *, max_restarts: int = 0, shutdown_timeout: float | None = None) -> Policy:
    """The default policy, with what the file at `path` changes, with what torchrun's command line changes.

    Args:
        path: a YAML file that names only what differs from the defaults; None for the defaults alone.
        max_restarts: torchrun's `--max-restarts`; above 0 it becomes `limits.per_job`.
        shutdown_timeout: torchrun's `--shutdown-timeout` in seconds; becomes `deadlines.shutdown` unless it is
            torchrun's default.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds a key or value that is not allowed; the message
            names file, line and key, what was found and what is allowed.
    """
    places: dict[str, _Place] = {}
    tree: _Tree = {}
    default = importlib.resources.files("leto_elastic.configs").joinpath("default.yaml")
    _lay_over(tree, places, default.read_text(encoding="utf-8"), _DEFAULT_NAME)
    if path is not None:
        _lay_over(tree, places, _read(path), path)
    if max_restarts > 0:
        _override(tree, places, "limits.per_job", max_restarts, "--max-restarts")
    if shutdown_timeout is not None and shutdown_timeout != TORCHRUN_SHUTDOWN:
        _override(tree, places, "deadlines.shutdown", shutdown_timeout, "--shutdown-timeout")
    return typing.cast(Policy, _build(Policy, tree, "", places))


def _read(path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"policy file {path} cannot be read: {error.strerror}; see --rdzv-conf config=") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"policy file {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"policy file {path} is larger than {MAX_FILE_BYTES} bytes; it names only what differs")
    return text


def _lay_over(tree: _Tree, places: dict[str, _Place], text: str, file: str) -> None:
    """Merge a file into `tree`, refusing what no policy has."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return
            _mapping(loader, root, Policy, "", tree, places, file)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{file}, line {line}: not valid YAML: {what}") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{file}, line {text.count(chr(10), 0, error.position) + 1}: {error.reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: nested too deeply to be a policy") from error


def _mapping(
    loader: _Loader,
    node: yaml.Node,
    kind: object,
    prefix: str,
    tree: _Tree,
    places: dict[str, _Place],
    file: str,
) -> None:
    """Merge one mapping node, known to be of type `kind` (a Section, or the ladders' dict), into `tree`."""
    here = _Place(file, node.start_mark.line + 1)
    if not isinstance(node, yaml.MappingNode):
        found = _show(_value(loader, node, prefix or "the policy", here))
        raise ConfigError(f"{here}: {prefix or 'the policy'} is {found}, allowed is a mapping of {_listed(kind)}")
    seen: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        place = _Place(file, line)
        key = _value(loader, key_node, f"a key of {prefix or 'the policy'}", place)
        if not isinstance(key, str) or key not in _keys(kind):
            raise ConfigError(f"{place}: unknown key {_unknown(prefix, key, kind)}")
        name = f"{prefix}.{key}" if prefix else key
        if key in seen:
            raise ConfigError(f"{place}: {name} is there twice, first on line {seen[key]}; keep one of them")
        seen[key] = line
        places[name] = place
        inner = _keys(kind)[key]
        if _is_mapping(inner):
            below = tree.setdefault(key, {})
            assert isinstance(below, dict)
            _mapping(loader, value, inner, name, below, places, file)
        else:
            tree[key] = _value(loader, value, name, place)
            _convert(tree[key], inner, name, place)


def _value(loader: _Loader, node: yaml.Node, name: str, place: _Place) -> object:
    try:
        return loader.construct_object(node, deep=True)
    except ValueError as error:  # such as the 45th of a month
        raise ConfigError(f"{place}: the value of {name} cannot be read: {error}") from error


def _keys(kind: object) -> Mapping[str, object]:
    """Key, as the file spells it, to type of a mapping in a policy."""
    if isinstance(kind, type) and issubclass(kind, Section):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}
    _, ladder = typing.get_args(kind)
    return {str(name): ladder for name in FailureClass}


def _is_mapping(kind: object) -> bool:
    return (isinstance(kind, type) and issubclass(kind, Section)) or typing.get_origin(kind) is dict


def _listed(kind: object) -> str:
    return ", ".join(_keys(kind))


def _unknown(prefix: str, key: object, kind: object) -> str:
    where = f"in {prefix}" if prefix else "at top level"
    near = difflib.get_close_matches(str(key), list(_keys(kind)), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{_show(key)} {where}, allowed are {_listed(kind)}{hint}"


def _convert(value: object, kind: object, name: str, place: _Place) -> None:
    try:
        msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {name} is {_show(value)}, allowed is {_allowed(kind)}") from error


def _allowed(kind: object) -> str:
    """The description of an annotated type: every leaf of a policy has one (a test holds it to that)."""
    for extra in getattr(kind, "__metadata__", ()):
        if isinstance(extra, msgspec.Meta) and extra.description is not None:
            return extra.description
    raise TypeError(f"{kind} has no description")


def _show(value: object) -> str:
    text = repr(value) if not isinstance(value, bool | None) else {True: "true", False: "false", None: "nothing"}[value]
    return text if len(text) <= 80 else f"{text[:77]}..."


def _override(tree: _Tree, places: dict[str, _Place], name: str, value: object, option: str) -> None:
    section, key = name.split(".")
    below = tree[section]
    assert isinstance(below, dict)
    places[name] = _Place(option)
    _convert(value, _keys(typing.get_type_hints(Policy)[section])[key], name, places[name])
    below[key] = value


def _build(kind: type[Section], tree: _Tree, prefix: str, places: Mapping[str, _Place]) -> Section:
    """Inside out, so that a contradiction is reported by the section that found it, at the user's line."""
    built: dict[str, object] = {}
    names = {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
    for key, inner in _keys(kind).items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(inner, type) and issubclass(inner, Section):
            below = tree[key]
            assert isinstance(below, dict)
            built[names[key]] = _build(inner, below, name, places)
        else:
            built[names[key]] = msgspec.convert(tree[key], type=inner)
    try:
        return kind(**built)
    except PolicyError as error:
        keys = [f"{prefix}.{key}" if prefix else key for key in error.keys]
        place = next((places[key] for key in keys if _changed(places.get(key))), _DEFAULT_NAME)
        raise ConfigError(f"{place}: {error}") from error


def _changed(place: _Place | None) -> bool:
    return place is not None and place.file != _DEFAULT_NAME
