"""What a server answered, as far as it must be understood: choices that grow and end, counts, errors.

All other fields are passed on and never looked at. Tokens are counted by the server's `usage`; where
it sends none, a piece of an answer counts as one token (too few where it speculates), and a whole answer
has one for every four characters.
Draft counts are read from specgate's own `specgate` object, vLLM's `metrics.speculative_decoding`
(`--per-request-spec-decode-metrics`), or OpenAI's `accepted_prediction_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.types import BASELINE, MethodCounts, PolicyChange, SequenceStats

_MAX_DEPTH = 256


class _Piece(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    refusal: Any = None
    function_call: Any = None

    @property
    def is_empty(self) -> bool:
        return not (
            self.content or self.reasoning_content or self.reasoning or self.tool_calls or self.refusal
            or self.function_call
        )  # fmt: skip


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Piece | None = None
    message: _Piece | None = None
    text: Any = None
    finish_reason: Any = None

    @property
    def num_pieces(self) -> int:
        """1 for a chunk that brings something; a whole message is guessed at four characters a token."""
        if self.delta is not None:
            return 0 if self.delta.is_empty else 1
        if self.message is not None:
            return len(str(self.message.content or "")) // 4 + 1
        return 1 if self.text else 0


class _CompletionDetails(msgspec.Struct):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """OpenAI's counts, of all answers together."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: _CompletionDetails | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Specgate(msgspec.Struct):
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_target_steps: int = 0
    accepted_per_position: list[int] = []


class _Speculative(msgspec.Struct):
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] | dict[str, int] | None = None


class _Metrics(msgspec.Struct):
    speculative_decoding: _Speculative | None = None


class Message(msgspec.Struct):
    """A chunk or a whole answer."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")
    specgate: _Specgate | None = None
    metrics: _Metrics | None = None

    @property
    def has_error(self) -> bool:
        """It says that things went wrong, whatever the status was."""
        return bytes(self.error) not in (b"", b"null")


_decoder = msgspec.json.Decoder(Message)


def read_message(data: bytes) -> Message | None:
    """None for what is no JSON object of the known shape: it is passed on all the same."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return None


class Tally:
    """The counts of one request, over all its answers."""

    def __init__(self, num_answers: int, policy: str) -> None:
        self.num_answers = num_answers
        self.policy = policy
        self.num_tokens = [0] * num_answers  # by pieces
        self.finish_reasons: list[str | None] = [None] * num_answers
        self.change: PolicyChange | None = None  # another pool had to serve it
        self.num_prompt_guess = 0
        self.usage_event: bytes | None = None  # to be shown to the caller
        self._ended: dict[int, str] = {}  # not yet told
        self._usage: Usage | None = None
        self._specgate: _Specgate | None = None
        self._vllm: _Speculative | None = None

    def add(self, message: Message) -> dict[int, int]:
        """Take a chunk in. Returns the pieces it brings, by answer; answers that only end have 0."""
        found: dict[int, int] = {}
        for choice in message.choices:
            index = choice.index
            if not 0 <= index < self.num_answers:
                continue
            if number := choice.num_pieces:
                self.num_tokens[index] += number
                found[index] = found.get(index, 0) + number
            if choice.finish_reason is not None:
                self.finish_reasons[index] = self._ended[index] = str(choice.finish_reason)
                found.setdefault(index, 0)
        if message.usage is not None:
            self._usage = message.usage
        if message.specgate is not None:
            self._specgate = message.specgate
        if message.metrics is not None and message.metrics.speculative_decoding is not None:
            self._vllm = message.metrics.speculative_decoding
        return found

    def take_reasons(self) -> dict[int, str]:
        """By answer, why it ended; each is told once."""
        ended, self._ended = self._ended, {}
        return ended

    def close(self) -> None:
        """The server has said that this is all. An answer that did not say why it ended has just stopped."""
        for index, reason in enumerate(self.finish_reasons):
            if reason is None:
                self.finish_reasons[index] = self._ended[index] = "stop"

    @property
    def is_done(self) -> bool:
        """Every answer has said why it ended."""
        return None not in self.finish_reasons

    def stats(self) -> list[SequenceStats]:
        """By answer. What the server told of all together is booked on the first."""
        tokens = self._output_tokens()
        usage = self._usage
        details = None if usage is None else usage.prompt_tokens_details
        prompt = self.num_prompt_guess if usage is None else usage.prompt_tokens or self.num_prompt_guess
        changes = () if self.change is None else (self.change,)
        drafts = self._drafts()
        first = SequenceStats(
            num_prompt_tokens=prompt,
            num_cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
            num_output_tokens=tokens[0],
            policy_changes=changes,
            num_target_steps=self._num_steps(sum(tokens)),
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=sum(drafts.accepted_per_position) or self._num_accepted(),
            accepted_per_position=drafts.accepted_per_position,
            drafted_per_position=_reached(drafts),
            by_method=(drafts,) if drafts.num_drafts and self.policy != BASELINE else (),
        )
        return [first, *(SequenceStats(num_output_tokens=number) for number in tokens[1:])]

    def _output_tokens(self) -> list[int]:
        """By answer; shared out evenly where pieces do not add up to what the server counted."""
        total = None if self._usage is None else self._usage.completion_tokens
        if total is None or total == sum(self.num_tokens):
            return list(self.num_tokens)
        share, rest = divmod(total, self.num_answers)
        return [share + (index < rest) for index in range(self.num_answers)]

    def _num_accepted(self) -> int:
        if self._specgate is not None:
            return self._specgate.num_accepted_tokens
        if self._vllm is not None:
            return self._vllm.num_accepted_draft_tokens
        details = None if self._usage is None else self._usage.completion_tokens_details
        return (details.accepted_prediction_tokens or 0) if details is not None else 0

    def _num_steps(self, num_tokens: int) -> int:
        """As told; else one a token, which claims nothing for speculation."""
        if self._specgate is not None:
            return self._specgate.num_target_steps
        return self._vllm.num_spec_steps if self._vllm is not None else num_tokens

    def _drafts(self) -> MethodCounts:
        if self._specgate is not None:
            told = self._specgate
            return method_counts(
                self.policy, told.num_target_steps, told.num_drafts, told.num_draft_tokens,
                told.accepted_per_position,
            )  # fmt: skip
        if self._vllm is not None:
            spec = self._vllm
            steps = spec.num_spec_steps
            return method_counts(
                self.policy, steps, steps, spec.num_draft_tokens, _survivals(spec.acceptance_histogram)
            )
        details = None if self._usage is None else self._usage.completion_tokens_details
        if details is None or details.accepted_prediction_tokens is None:
            return MethodCounts(self.policy)
        num = details.accepted_prediction_tokens + (details.rejected_prediction_tokens or 0)
        return MethodCounts(self.policy, num_draft_tokens=num)


def _survivals(histogram: Sequence[int] | Mapping[str, int] | None) -> list[int]:
    """From steps by number accepted to steps that accepted at least 1, 2, ..."""
    if histogram is None:
        return []
    if isinstance(histogram, Mapping):
        pairs = {int(key): number for key, number in histogram.items() if key.isdecimal()}
        size = min(max(pairs, default=0), _MAX_DEPTH) + 1
        histogram = [pairs.get(index, 0) for index in range(size)]
    return [sum(histogram[depth:]) for depth in range(1, len(histogram))]


def method_counts(
    method: str, num_steps: int, num_drafts: int, num_draft_tokens: int, accepted: Sequence[int]
) -> MethodCounts:
    """Counts by depth from what servers tell. They do not tell how long each draft was: all are taken to
    be as equally long as their sum allows. Numbers that cannot be are taken as nothing told."""
    sound = (
        0 < num_drafts <= max(num_draft_tokens, 0)
        and len(accepted) <= _MAX_DEPTH
        and all(0 <= now <= before for before, now in zip((num_drafts, *accepted), accepted, strict=False))
        and sum(accepted) <= num_draft_tokens
        and num_draft_tokens // num_drafts < _MAX_DEPTH
    )
    if not sound:
        return MethodCounts(method)
    whole, rest = divmod(num_draft_tokens, num_drafts)
    drafted = [num_drafts] * whole + ([rest] if rest else [])
    drafted += [0] * (len(accepted) - len(drafted))
    kept = list(accepted) + [0] * (len(drafted) - len(accepted))
    drafted = [max(d, a) for d, a in zip(drafted, kept, strict=True)]
    reached = [min(d, before) for d, before in zip(drafted, (num_drafts, *kept), strict=False)]
    return MethodCounts(
        method=method,
        num_steps=max(num_steps, num_drafts),
        num_drafts=num_drafts,
        num_draft_tokens=num_draft_tokens,
        accepted_per_position=tuple(kept),
        drafted_per_position=tuple(drafted),
        refused_per_position=tuple(r - a for r, a in zip(reached, kept, strict=True)),
    )


def _reached(counts: MethodCounts) -> tuple[int, ...]:
    """Drafts whose token at each depth was decided upon: all before it stood."""
    before = (counts.num_drafts, *counts.accepted_per_position)
    return tuple(min(d, b) for d, b in zip(counts.drafted_per_position, before, strict=False))
