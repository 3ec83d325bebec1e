"""The JSON schema of the configuration, generated from the classes."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, Union

from specgate.config.loader import field_limits
from specgate.config.schema import Config

_KEYWORDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "doc": "description"}
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string"}


def config_json_schema() -> dict[str, Any]:
    """Draft 2020-12 schema of a configuration file."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "specgate configuration"}
    return schema | _of_dataclass(Config)


def _of_dataclass(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for f in dataclasses.fields(cls):
        limits = field_limits(cls, f.name)
        properties[f.name] = _of_hint(hints[f.name]) | {
            keyword: limits[name] for name, keyword in _KEYWORDS.items() if name in limits
        }
        if "pattern" in limits:
            properties[f.name]["pattern"] = f"^(?:{limits['pattern']})$"
        if f.default is not dataclasses.MISSING and not dataclasses.is_dataclass(f.default):
            properties[f.name]["default"] = _plain(f.default)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            required.append(f.name)
    out = {"type": "object", "properties": properties, "additionalProperties": False}
    return out | ({"required": required} if required else {})


def _of_hint(hint: Any) -> dict[str, Any]:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return {"anyOf": [_of_hint(options[0]), {"type": "null"}]}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _of_dataclass(hint)
    if origin is tuple:
        return {"type": "array", "items": _of_hint(typing.get_args(hint)[0])}
    if origin is Literal:
        return {"enum": list(typing.get_args(hint))}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of_hint(typing.get_args(hint)[1])}
    return {"type": _SCALARS[hint]}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
