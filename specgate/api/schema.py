"""What the API accepts, as JSON schemas: used to check requests and to write `/openapi.json`.

Fields come in three kinds. *Used* ones shape the answer. *Inert* ones cannot change the answer
and are accepted. *Unsupported* ones would change it: they are understood (explain shows them,
the task estimate reads them) but generating with them is a 400 that names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgate.config import RequestsConfig
from specgate.types import TASKS

JsonSchema = dict[str, Any]

INERT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "prediction",
    }
)  # fmt: skip
UNSUPPORTED = frozenset(
    {
        "functions", "function_call", "modalities", "audio",
        "reasoning_effort", "verbosity", "web_search_options", "moderation", "suffix", "best_of",
    }
)  # fmt: skip
"""Unless the value is the one that changes nothing: see `specgate.api.parse`."""

_TEXT: JsonSchema = {"type": "string"}
_OBJECT: JsonSchema = {"type": "object"}
_TOKEN: JsonSchema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOKENS: JsonSchema = {"type": "array", "items": _TOKEN, "minItems": 1}


def _number(low: float, high: float, doc: str = "") -> JsonSchema:
    return {"type": "number", "minimum": low, "maximum": high} | ({"description": doc} if doc else {})


def _integer(low: int, high: int, doc: str = "") -> JsonSchema:
    return {"type": "integer", "minimum": low, "maximum": high} | ({"description": doc} if doc else {})


def _closed(properties: Mapping[str, Any], required: tuple[str, ...] = ()) -> JsonSchema:
    out: JsonSchema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return out | ({"required": list(required)} if required else {})


SPECGATE = _closed(
    {
        "policy": _TEXT | {"maxLength": 64, "description": "auto, baseline, or a loaded speculation method"},
        "num_speculative_tokens": _integer(0, 64, "used exactly, not as a ceiling"),
        "task": {"type": "string", "enum": list(TASKS)},
        "objective": {"type": "string", "enum": ["latency", "throughput", "slo"]},
        "slo": _closed({"ttft_ms": _number(0, 1e9), "tpot_ms": _number(0, 1e9)}),
        "explore": {"type": "boolean", "description": "false: never explored on"},
        "trace": {
            "type": "boolean",
            "description": "streams only: each choice says which text came from accepted draft tokens",
        },
        "learn": {"type": "boolean", "description": "false: synthetic, nothing is learned of it"},
    }
)

_TOOL_CALL = _closed(
    {
        "id": _TEXT,
        "type": _TEXT,
        "index": _integer(0, 4096),
        "function": _closed({"name": _TEXT, "arguments": _TEXT, "parsed_arguments": {}}, ("name",)),
        "custom": _OBJECT,
    },
    ("function",),
)
_PART = _closed(
    {
        "type": _TEXT,
        "text": _TEXT,
        "refusal": _TEXT,
        "image_url": {},
        "input_audio": {},
        "file": {},
        "prompt_cache_breakpoint": {},
    },
    ("type",),
)
MESSAGE = _closed(
    {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {
            "anyOf": [_TEXT, {"type": "array", "items": _PART}],
            "description": "names of special tokens in it are read as those tokens, as vLLM does",
        },
        "name": _TEXT,
        "tool_calls": {"type": "array", "items": _TOOL_CALL, "maxItems": 1024},
        "tool_call_id": _TEXT,
        "refusal": _TEXT,
        "annotations": {"type": "array"},
        "parsed": {"description": "what the official client made of an earlier answer; left out"},
        "audio": _OBJECT,
        "function_call": _OBJECT,
    },
    ("role",),
)
MESSAGES: JsonSchema = {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 4096}
TOOLS: JsonSchema = {
    "type": "array",
    "maxItems": 256,
    "items": {
        "type": "object",
        "properties": {
            "type": _TEXT,
            "function": {
                "type": "object",
                "properties": {"name": _TEXT, "description": _TEXT, "parameters": _OBJECT},
                "required": ["name"],
            },
        },
        "required": ["type"],
    },
}


RESPONSE_FORMAT = _closed(
    {
        "type": _TEXT | {"description": "text, json_object or json_schema"},
        "json_schema": _closed(
            {
                "name": _TEXT,
                "description": _TEXT,
                "schema": _OBJECT,
                "strict": {"type": "boolean", "description": "the schema is enforced either way"},
            }
        ),
    },
    ("type",),
)


def _common(limits: RequestsConfig) -> JsonSchema:
    return {
        "model": _TEXT,
        "frequency_penalty": _number(-2, 2),
        "presence_penalty": _number(-2, 2),
        "logit_bias": {
            "type": "object",
            "additionalProperties": _number(-100, 100),
            "maxProperties": 1024,
            "description": "token id -> bias",
        },
        "n": _integer(1, limits.max_n),
        "seed": _integer(-(2**63), 2**63 - 1),
        "stop": {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": 1024},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": 1024},
                    "maxItems": limits.max_stop,
                },
            ]
        },
        "stream": {"type": "boolean"},
        "stream_options": _closed(
            {"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}}
        ),
        "temperature": _number(0, 2),
        "top_p": _number(0, 1),
        "max_tokens": _integer(1, 2**31 - 1),
        "user": _TEXT,
        "metadata": _OBJECT,
        "store": {"type": "boolean"},
        "service_tier": _TEXT,
        "safety_identifier": _TEXT,
        "prompt_cache_key": _TEXT,
        "prompt_cache_options": _OBJECT,
        "prompt_cache_retention": _TEXT,
        "top_k": _integer(-1, 2**31 - 1, "0 or -1: off"),
        "min_p": _number(0, 1),
        "repetition_penalty": _number(0.01, 10),
        "min_tokens": _integer(0, 2**31 - 1),
        "ignore_eos": {"type": "boolean"},
        "priority": _integer(-1000, 1000, "smaller is served first; not below that of the key"),
        "stop_token_ids": {"type": "array", "items": _TOKEN, "maxItems": limits.max_stop},
        "specgate": SPECGATE,
    }


def chat_schema(limits: RequestsConfig) -> JsonSchema:
    """The body of /v1/chat/completions."""
    chat: JsonSchema = {
        "messages": MESSAGES,
        "max_completion_tokens": _integer(1, 2**31 - 1),
        "logprobs": {"type": "boolean"},
        "top_logprobs": _integer(0, limits.max_logprobs),
        "tools": TOOLS,
        "tool_choice": {
            "anyOf": [_TEXT, _OBJECT],
            "description": "none, auto, required, or an object of type function or allowed_tools",
        },
        "functions": {"type": "array", "items": _OBJECT, "maxItems": 1024},
        "function_call": {"anyOf": [_TEXT, _OBJECT]},
        "parallel_tool_calls": {"type": "boolean"},
        "response_format": RESPONSE_FORMAT,
        "modalities": {"type": "array", "items": _TEXT},
        "audio": _OBJECT,
        "prediction": _OBJECT,
        "reasoning_effort": _TEXT,
        "verbosity": {"type": "string", "enum": ["low", "medium", "high"]},
        "web_search_options": _OBJECT,
        "moderation": _OBJECT,
        "chat_template_kwargs": _OBJECT,
    }
    return _closed(_common(limits) | chat, ("model", "messages"))


def completions_schema(limits: RequestsConfig) -> JsonSchema:
    """The body of /v1/completions."""
    completions: JsonSchema = {
        "prompt": {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": limits.max_prompts},
                _TOKENS,
                {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": limits.max_prompts},
            ]
        },
        "max_tokens": _integer(0, 2**31 - 1, "0 with echo and logprobs scores the prompt"),
        "logprobs": _integer(0, limits.max_logprobs),
        "echo": {"type": "boolean"},
        "suffix": _TEXT,
        "best_of": _integer(1, 2**31 - 1),
    }
    return _closed(_common(limits) | completions, ("model", "prompt"))


TOKENIZE = _closed(
    {
        "model": _TEXT,
        "prompt": _TEXT,
        "messages": MESSAGES,
        "add_special_tokens": {"type": "boolean"},
        "add_generation_prompt": {"type": "boolean", "description": "with messages; by default true"},
        "return_token_strs": {"type": "boolean"},
        "chat_template_kwargs": _OBJECT,
    }
)
DETOKENIZE = _closed({"model": _TEXT, "tokens": {"type": "array", "items": _TOKEN}}, ("tokens",))
FORCE = _closed({"force": {"type": "string", "enum": ["baseline"]}, "persist": {"type": "boolean"}})
LOADED = _closed({"model": _TEXT, "method": _TEXT, "loaded": {"type": "boolean"}}, ("method", "loaded"))
DRAIN = _closed({"draining": {"type": "boolean"}})
