"""YAML in, `Config` out. Every fault is named with file, line, path, and what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from specgate.config.check import cross_check
from specgate.config.rollout import RolloutConfig, check_rollout
from specgate.config.schema import ENGINE_LIMITS, Config
from specgate.errors import ConfigError

LOCAL_CONFIG = Path(__file__).with_name("local.yaml")
"""What is served when no file is named. Also at `configs/local.yaml` of a checkout."""


@dataclass(slots=True)
class _Node:
    """A YAML value that remembers where it stood."""

    value: Any  # scalar, dict[str, _Node] or list[_Node]
    where: str


class _Faults(list[str]):
    def add(self, where: str, path: str, message: str) -> Any:
        """One line more. Returns None, which is then the value of what could not be built."""
        self.append(f"{where}: {path or '(top)'}: {message}")
        return None


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read `path` (None: the shipped local config), apply `dotted.key=value` overrides, check all.

    Raises ConfigError with one line per fault.
    """
    file = Path(path) if path is not None else LOCAL_CONFIG
    return parse_config(_read(file), str(file), overrides)


def parse_config(text: str, name: str, overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, from text; `name` stands for the file in messages."""
    faults = _Faults()
    root = _compose(text, name, faults)
    for item in overrides:
        _apply_override(root, item, faults)
    if faults:
        raise ConfigError(faults)
    return typing.cast(Config, _finish(Config, root, cross_check, faults))


def load_rollout(path: str | Path) -> RolloutConfig:
    """Read the file of one rollout. Raises ConfigError with one line per fault."""
    file = Path(path)
    root = _compose(_read(file), str(file), faults := _Faults())
    if faults:
        raise ConfigError(faults)
    return typing.cast(RolloutConfig, _finish(RolloutConfig, root, check_rollout, faults))


def is_rollout(path: str | Path) -> bool:
    """Whether the file means to be a rollout's, valid or not. Raises ConfigError if it is no YAML."""
    file = Path(path)
    root = _compose(_read(file), str(file), _Faults())
    return isinstance(root.value, dict) and "rollout" in root.value


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: cannot be read: {error}"]) from error


def _finish(
    cls: type, root: _Node, check: Callable[[Any], Iterable[tuple[str, str]]], faults: _Faults
) -> Any:
    """The typed whole, checked for faults that need all of it."""
    config = _build(cls, root, "", {}, faults)
    if faults:
        raise ConfigError(faults)
    for at, message in check(config):
        faults.add(_where(root, at), at, message)
    if faults:
        raise ConfigError(faults)
    return config


# --- YAML to nodes -------------------------------------------------------------------------


def _compose(text: str, name: str, faults: _Faults) -> _Node:
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is None:
            return _Node({}, f"{name}:1")
        return _convert(tree, name, "", faults, 0)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError([f"{name}:{mark.line + 1 if mark else 1}: not YAML: {problem}"]) from error


def _convert(tree: yaml.Node, name: str, path: str, faults: _Faults, depth: int) -> _Node:
    where = f"{name}:{tree.start_mark.line + 1}" if name[:2] != "--" else name
    if depth > 32:
        raise ConfigError([f"{where}: {path}: nested too deeply"])
    if isinstance(tree, yaml.MappingNode):
        entries: dict[str, _Node] = {}
        for key_node, value_node in tree.value:
            key = str(key_node.value)
            at = f"{path}.{key}" if path else key
            if key in entries:
                faults.add(f"{name}:{key_node.start_mark.line + 1}", at, "given twice")
            entries[key] = _convert(value_node, name, at, faults, depth + 1)
        return _Node(entries, where)
    if isinstance(tree, yaml.SequenceNode):
        items = [_convert(v, name, f"{path}.{i}", faults, depth + 1) for i, v in enumerate(tree.value)]
        return _Node(items, where)
    try:
        return _Node(yaml.SafeLoader("").construct_object(tree), where)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{where}: {path}: cannot be read as a value: {error}"]) from error


def _apply_override(root: _Node, item: str, faults: _Faults) -> None:
    key, equals, text = item.partition("=")
    where = f"--set {key}"
    if not equals or not key:
        faults.append(f"--set {item}: write dotted.key=value")
        return
    value = _compose(text, where, faults) if text.strip() else _Node("", where)
    node, parts = root, key.split(".")
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if isinstance(node.value, list):
            if not part.isdigit() or int(part) >= len(node.value):
                place = ".".join(parts[: index + 1])
                faults.add(where, place, f"a list: use an index from 0 to {len(node.value) - 1}")
                return
            if last:
                node.value[int(part)] = value
            else:
                node = node.value[int(part)]
            continue
        if node.value is None:
            node.value = {}
        if not isinstance(node.value, dict):
            faults.add(where, ".".join(parts[:index]), "is a plain value and has no keys")
            return
        if last:
            node.value[part] = value
        else:
            node = node.value.setdefault(part, _Node({}, where))


def _where(root: _Node, path: str) -> str:
    node = root
    for part in path.split("."):
        if isinstance(node.value, dict) and part in node.value:
            node = node.value[part]
        elif isinstance(node.value, list) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
        else:
            break
    return node.where


# --- nodes to typed values -----------------------------------------------------------------


def _build(hint: Any, node: _Node, path: str, limits: Mapping[str, Any], faults: _Faults) -> Any:
    """The typed value of `node`, or None with a fault added."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if node.value is None else _build(options[0], node, path, limits, faults)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build_dataclass(hint, node, path, faults)
    if origin is tuple:
        if not isinstance(node.value, list):
            return faults.add(node.where, path, "must be a list")
        (item_hint, _) = typing.get_args(hint)
        return tuple(_build(item_hint, v, f"{path}.{i}", {}, faults) for i, v in enumerate(node.value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(node.value, dict):
            return faults.add(node.where, path, "must be a mapping")
        value_hint = typing.get_args(hint)[1]
        return {k: _build(value_hint, v, f"{path}.{k}", {}, faults) for k, v in node.value.items()}
    return _build_scalar(hint, node, path, limits, faults)


def _build_dataclass(cls: type, node: _Node, path: str, faults: _Faults) -> Any:
    if not isinstance(node.value, dict):
        return faults.add(node.where, path, f"must be a mapping with keys of: {', '.join(_names(cls))}")
    hints, before = typing.get_type_hints(cls), len(faults)
    values: dict[str, Any] = {}
    for key, child in node.value.items():
        at = f"{path}.{key}" if path else key
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            faults.add(child.where, at, f"unknown key; {hint}allowed: {', '.join(_names(cls))}")
            continue
        values[key] = _build(hints[key], child, at, field_limits(cls, key), faults)
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in node.value:
            faults.add(node.where, f"{path}.{f.name}" if path else f.name, "is required")
    return cls(**values) if len(faults) == before else None


def _build_scalar(hint: Any, node: _Node, path: str, limits: Mapping[str, Any], faults: _Faults) -> Any:
    value = node.value
    if isinstance(value, dict | list):
        return faults.add(node.where, path, f"must be {_kind(hint)}")
    if typing.get_origin(hint) is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        allowed = typing.get_args(hint) or [member.value for member in hint]
        if value is False and "off" in allowed:  # YAML 1.1 reads a plain `off` so
            value = "off"
        if value not in allowed:
            return faults.add(node.where, path, f"is {value!r}; allowed: {', '.join(map(str, allowed))}")
        return hint(value) if isinstance(hint, type) else value
    value = _coerce(hint, value)
    if value is None:
        return faults.add(node.where, path, f"is {node.value!r}; must be {_kind(hint)}")
    if hint in (int, float):
        if "ge" in limits and value < limits["ge"]:
            return faults.add(node.where, path, f"is {value}; must be at least {limits['ge']}")
        if "gt" in limits and value <= limits["gt"]:
            return faults.add(node.where, path, f"is {value}; must be above {limits['gt']}")
        if "le" in limits and value > limits["le"]:
            return faults.add(node.where, path, f"is {value}; must be at most {limits['le']}")
    if hint is str and "pattern" in limits and not re.fullmatch(limits["pattern"], value):
        return faults.add(node.where, path, f"is {value!r}; must match {limits['pattern']}")
    return value


def _coerce(hint: Any, value: Any) -> Any:
    """`value` as `hint`, or None. YAML reads 1e-3 as text, hence the float case."""
    if hint is bool:
        return value if isinstance(value, bool) else None
    if hint is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool):
        return None
    if hint is int:
        return value if isinstance(value, int) else None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def field_limits(cls: type, name: str) -> Mapping[str, Any]:
    """Meaning and limits of one field, declared here or (for the engine's) in `ENGINE_LIMITS`."""
    for f in dataclasses.fields(cls):
        if f.name == name and f.metadata:
            return f.metadata
    return ENGINE_LIMITS.get(cls, {}).get(name, {})


def _names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _kind(hint: Any) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(hint, str(hint))
