"""Deltas to OpenAI's JSON: chat and legacy completions, whole answers and chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from specgate.generation import Generation
from specgate.types import Delta, DeltaLogprob, ToolCallDelta

_FLOOR = -9999.0  # what JSON gets for the logarithm of zero, which it cannot write
Json = dict[str, Any]


class Format(Protocol):
    """One endpoint's shapes for one request. Fed with every delta, in order."""

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """The `choices` entries to stream for a delta; none if it shows nothing."""
        ...

    def add(self, index: int, delta: Delta) -> None:
        """Collect a delta for the whole answer."""
        ...

    def choices(self) -> list[Json]:
        """The `choices` of the whole answer."""
        ...


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, generation: Generation) -> None:
        self._has_logprobs = generation.request.sampling.num_logprobs is not None
        self._begun: set[int] = set()
        self._pieces = [_Pieces() for _ in generation.answers]

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        out: list[Json] = []
        if index not in self._begun:
            self._begun.add(index)
            out.append(_chunk(index, {"role": "assistant", "content": "", "refusal": None}))
        if delta.text or delta.logprobs:
            logprobs = self._logprobs(delta.logprobs) if self._has_logprobs else None
            out.append(_chunk(index, {"content": delta.text}, logprobs) | _trace(delta))
        if delta.tool_calls:
            out.append(_chunk(index, {"tool_calls": [_call_piece(piece) for piece in delta.tool_calls]}))
        if delta.finish_reason is not None:
            end = _chunk(index, {})
            out.append(end | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason})
        return out

    def add(self, index: int, delta: Delta) -> None:
        self._pieces[index].add(delta)

    def choices(self) -> list[Json]:
        return [
            {
                "index": index,
                "message": pieces.message(),
                "logprobs": self._logprobs(pieces.logprobs) if self._has_logprobs else None,
                "finish_reason": pieces.finish_reason,
                "stop_reason": pieces.stop_reason,
            }
            for index, pieces in enumerate(self._pieces)
        ]

    def _logprobs(self, logprobs: Sequence[DeltaLogprob]) -> Json:
        content = [
            {
                "token": entry.token,
                "logprob": _finite(entry.logprob),
                "bytes": list(entry.token_bytes),
                "top_logprobs": [
                    {"token": token, "logprob": _finite(value), "bytes": list(raw)}
                    for token, _, value, raw in entry.top
                ],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}


class CompletionsFormat:
    """text_completion, whole and streamed. With `echo` the prompt comes first, as text and as tokens."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._num_logprobs = generation.request.sampling.num_logprobs
        self._has_echo = generation.request.has_echo
        self._begun: set[int] = set()
        self._offsets = [0] * len(generation.answers)
        self._pieces = [_Pieces() for _ in generation.answers]

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        text, entries = self._with_prompt(index, delta)
        if not text and not entries and delta.finish_reason is None:
            return []
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, entries),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return [choice | _trace(delta)]

    def add(self, index: int, delta: Delta) -> None:
        text, entries = self._with_prompt(index, delta)
        self._pieces[index].add(delta, text, entries)

    def choices(self) -> list[Json]:
        return [
            {
                "index": index,
                "text": "".join(pieces.text),
                "logprobs": self._logprobs(index, pieces.logprobs),
                "finish_reason": pieces.finish_reason,
                "stop_reason": pieces.stop_reason,
            }
            for index, pieces in enumerate(self._pieces)
        ]

    def _with_prompt(self, index: int, delta: Delta) -> tuple[str, list[DeltaLogprob | None]]:
        entries: list[DeltaLogprob | None] = list(delta.logprobs)
        if not self._has_echo or index in self._begun:
            return delta.text, entries
        self._begun.add(index)
        prompt = self._generation.prompt_of(index).prepared
        return prompt.text + delta.text, [*delta.prompt_logprobs, *entries]

    def _logprobs(self, index: int, entries: Sequence[DeltaLogprob | None]) -> Json | None:
        if self._num_logprobs is None:
            return None
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._offsets[index])
            if entry is None:
                token, num_chars = self._first_token(index, entries)
                values.append(None)
                tops.append(None)
            else:
                token, num_chars = entry.token, len(entry.token)
                values.append(_finite(entry.logprob))
                tops.append({t: _finite(v) for t, _, v, _ in entry.top} | {token: _finite(entry.logprob)})
            tokens.append(token)
            self._offsets[index] += num_chars
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _first_token(self, index: int, entries: Sequence[DeltaLogprob | None]) -> tuple[str, int]:
        """The prompt's first token, which has no logprob and therefore no entry, and how much of the
        prompt's text it is: what the entries after it leave (nothing, for a bos token)."""
        prompt = self._generation.prompt_of(index).prepared
        rest = "".join(e.token for e in entries[1 : len(prompt.token_ids)] if e is not None)
        is_whole = prompt.text.endswith(rest)  # not if a character is split between tokens
        return prompt.first_token, len(prompt.text) - len(rest) if is_whole else len(prompt.first_token)


class _Pieces:
    """One whole answer being collected."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.logprobs: list[Any] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._calls: dict[int, Json] = {}

    def message(self) -> Json:
        """The assistant's message. Calls without text have no content."""
        text = "".join(self.text)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._calls:
            message["content"] = text if text.strip() else None
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return message

    def add(
        self, delta: Delta, text: str | None = None, logprobs: Sequence[DeltaLogprob | None] | None = None
    ) -> None:
        self.text.append(delta.text if text is None else text)
        self.logprobs += delta.logprobs if logprobs is None else logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        for piece in delta.tool_calls:
            if piece.id is not None:
                function = {"name": piece.name, "arguments": ""}
                self._calls[piece.index] = {"id": piece.id, "type": "function", "function": function}
            self._calls[piece.index]["function"]["arguments"] += piece.arguments


def _chunk(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _call_piece(piece: ToolCallDelta) -> Json:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _trace(delta: Delta) -> Json:
    """Whose draft tokens the text came from, where that was asked for."""
    if not delta.pieces:
        return {}
    return {"specgate": {"pieces": [{"text": text, "accepted": method} for text, method in delta.pieces]}}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _FLOOR
