"""`response_format`, `tools` and `tool_choice`: checked, with every fault named by its field.

What schemas may say is the grammar library's business; the engine's refusal names the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from specgate.api.jsoncheck import shown
from specgate.errors import BadRequest, UnsupportedParameter
from specgate.types import ToolChoice

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FORMATS = ("text", "json_object", "json_schema")
_CHOICES = ("none", "auto", "required")
_Fields = Mapping[str, Any]


def response_format_of(fields: _Fields, max_bytes: int) -> dict[str, Any] | None:
    """The field as it is, once it is known to make sense."""
    value: dict[str, Any] | None = fields.get("response_format")
    if value is None:
        return None
    kind = value["type"]
    if kind not in _FORMATS:
        raise BadRequest(
            f"'response_format.type' is {shown(kind)}; allowed: {', '.join(_FORMATS)}.",
            "response_format.type",
        )
    at = "response_format.json_schema"
    if kind != "json_schema":
        if value.get("json_schema") is not None:
            raise BadRequest(f"'{at}' needs 'response_format.type' to be 'json_schema'.", at)
        return value
    wanted = _object(value.get("json_schema"), at)
    _check_name(wanted.get("name"), f"{at}.name")
    _check_flag(wanted.get("strict"), f"{at}.strict")
    if wanted.get("schema") is not None:
        schema = _object(wanted["schema"], f"{at}.schema")
        _check_size(schema, max_bytes, f"{at}.schema")
    return value


def tools_of(fields: _Fields, max_bytes: int) -> tuple[dict[str, Any], ...]:
    """The functions on offer."""
    tools = tuple(fields.get("tools", ()))
    names: set[str] = set()
    for place, tool in enumerate(tools):
        at = f"tools[{place}]"
        if tool["type"] != "function":
            raise UnsupportedParameter(
                f"'{at}.type' is {shown(tool['type'])}; only 'function' is supported.", f"{at}.type"
            )
        function = _object(tool.get("function"), f"{at}.function")
        name = function["name"]
        _check_name(name, f"{at}.function.name")
        if name in names:
            raise BadRequest(
                f"'{at}.function.name' is {name!r}, like a tool before it.", f"{at}.function.name"
            )
        names.add(name)
        _check_flag(function.get("strict"), f"{at}.function.strict")
        parameters = function.get("parameters")
        if parameters and parameters.get("type", "object") != "object":
            where = f"{at}.function.parameters.type"
            raise BadRequest(f"'{where}' is {shown(parameters['type'])}; it must be 'object'.", where)
    _check_size(tools, max_bytes, "tools")
    return tools


def tool_choice_of(fields: _Fields, tools: tuple[dict[str, Any], ...]) -> ToolChoice:
    """Which of the tools may, or must, be called."""
    value = fields.get("tool_choice", "auto" if tools else "none")
    mode: str = value
    names: tuple[str, ...] = ()
    if isinstance(value, dict):
        mode, names = _chosen(value)
    elif value not in _CHOICES:
        raise BadRequest(
            f"'tool_choice' is {shown(value)}; allowed: {', '.join(_CHOICES)}, or an object.", "tool_choice"
        )
    if not tools:
        if mode == "required":
            raise BadRequest("'tool_choice' asks for a call, but 'tools' offers none.", "tool_choice")
        return ToolChoice("none")
    known = {tool["function"]["name"] for tool in tools}
    for name in names:
        if name not in known:
            raise BadRequest(f"'tool_choice' names {shown(name)}, which is not in 'tools'.", "tool_choice")
    is_named = isinstance(value, dict) and value.get("type") == "function"
    is_parallel = fields.get("parallel_tool_calls", True) and not is_named
    return ToolChoice(mode, names, is_parallel)


def _chosen(value: _Fields) -> tuple[str, tuple[str, ...]]:
    """Mode and names of a choice that is an object."""
    kind = value.get("type")
    if kind == "function":
        return "required", (_named(value, "tool_choice"),)
    if kind != "allowed_tools":
        raise BadRequest(
            f"'tool_choice.type' is {shown(kind)}; allowed: function, allowed_tools.", "tool_choice.type"
        )
    at = "tool_choice.allowed_tools"
    allowed = _object(value.get("allowed_tools"), at)
    mode, listed = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise BadRequest(f"'{at}.mode' is {shown(mode)}; allowed: auto, required.", f"{at}.mode")
    if not isinstance(listed, list) or not listed:
        raise BadRequest(f"'{at}.tools' must list at least one tool.", f"{at}.tools")
    names = [_named(_object(tool, f"{at}.tools[{i}]"), f"{at}.tools[{i}]") for i, tool in enumerate(listed)]
    return mode, tuple(names)


def _named(value: _Fields, at: str) -> str:
    function = _object(value.get("function"), f"{at}.function")
    name = function.get("name")
    if not isinstance(name, str):
        raise BadRequest(
            f"'{at}.function.name' is {shown(name)}; it must be a string.", f"{at}.function.name"
        )
    return name


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        what = "is required" if value is None else f"is {shown(value)}; it must be an object"
        raise BadRequest(f"'{at}' {what}.", at)
    return value


def _check_name(name: Any, at: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(
            f"'{at}' is {shown(name)}; it must be 1 to 64 letters, digits, underscores or dashes.", at
        )


def _check_flag(value: Any, at: str) -> None:
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"'{at}' is {shown(value)}; it must be true or false.", at)


def _check_size(value: Any, most: int, at: str) -> None:
    size = len(msgspec.json.encode(value))
    if size > most:
        raise BadRequest(f"'{at}' takes {size} bytes as JSON; at most {most} are allowed.", at)
