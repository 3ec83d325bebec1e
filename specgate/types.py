"""Data the gateway passes between its parts. Frozen; no I/O, no torch.

A request's life in types: `GenerationRequest` (parsed) -> `PreparedPrompt` (encoded by the
backend) -> `Decision` (policy, with reasons) -> stream of `Delta` -> `RequestOutcome`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.types import GrammarSpec, PolicyChange, SamplingParams, SequenceStats
from router_models.request_text import content_text
from router_models.types import TASKS as TASKS


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the caller asked of specgate itself (header `X-SpecGate-Policy` or body `specgate`)."""

    policy: str | None = None  # None or "auto": decide
    num_speculative_tokens: int | None = None
    task: str | None = None
    objective: str | None = None  # latency, throughput, slo
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    explore: bool = True
    learn: bool = True

    @property
    def may_probe(self) -> bool:
        """Whether guards and planner may try something with it: they learn from what they try."""
        return self.explore and self.learn


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether an answer may, or must, call tools, and which (no names: all that are offered)."""

    mode: str = "none"  # none, auto, required
    names: tuple[str, ...] = ()
    is_parallel: bool = True  # several calls in one answer


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One API request, validated. Exactly one of `messages` and `prompt` is set.

    `unsupported` names fields that are understood and shown by explain but cannot be generated
    with yet: the pipeline answers 400 naming the first.
    """

    request_id: str
    endpoint: str  # chat, completions
    model: str
    sampling: SamplingParams
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None  # text or token ids
    more_prompts: tuple[str | tuple[int, ...], ...] = ()  # a list of prompts: those after the first;
    # the pipeline hands each to the backend as a request with that one `prompt`
    suffix: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    stop: tuple[str, ...] = ()
    has_echo: bool = False
    is_stream: bool = False
    has_usage: bool = False  # stream_options.include_usage
    has_explicit_max_tokens: bool = False  # else `sampling.max_tokens` is cut to what the context allows
    overrides: Overrides = field(default_factory=Overrides)
    unsupported: tuple[str, ...] = ()
    tenant: str = ""  # whose request: name of the API key, else ""
    user: str = ""  # the field `user`: keeps its arm of a rollout
    headers: Mapping[str, str] = field(default_factory=dict)  # those that rollouts look at; lower case
    priority: int = 0
    has_trace: bool = False  # streamed pieces say which drafter they came from
    raw: bytes = b""  # the body as it came, for models that other servers run
    traceparent: str = ""  # W3C trace context, to be offered to those servers

    @property
    def user_text(self) -> str:
        """What was asked: the last user message, or the raw prompt where it is text."""
        if self.messages is None:
            return self.prompt if isinstance(self.prompt, str) else ""
        asked = (m.get("content") for m in reversed(self.messages) if m.get("role") == "user")
        return content_text(next(asked, ""))


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as the backend will run it."""

    token_ids: tuple[int, ...]
    text: str  # after the chat template; never logged
    num_guessed: int | None = None  # tokens, where only other servers can count them
    grammar: GrammarSpec | None = None  # what the answer must look like
    first_token: str = ""  # its text; not part of `text` where encoding put it there (a bos token)

    @property
    def num_tokens(self) -> int:
        """Counted, or guessed where they cannot be."""
        return len(self.token_ids) if self.num_guessed is None else self.num_guessed


@dataclass(frozen=True, slots=True)
class DeltaLogprob:
    """Logprob of one emitted token, in text. `top` is best first."""

    token: str
    token_id: int
    logprob: float
    token_bytes: bytes
    top: tuple[tuple[str, int, float, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number `index` of an answer. The first has id and name; arguments are JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one answer. Text never splits a character and never shows (part of) a stop string.

    `num_tokens` counts the tokens behind this piece, `num_accepted` those that were draft tokens.
    The last delta has `finish_reason` and `stats`, cut to the same token as the text.
    """

    text: str = ""
    num_tokens: int = 0
    num_accepted: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[DeltaLogprob, ...] = ()
    prompt_logprobs: tuple[DeltaLogprob | None, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None  # stop, length, tool_calls
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    stats: SequenceStats | None = None
    queue_wait_s: float | None = None  # in the backend; with the first delta, where the backend can tell
    # From other servers: their bytes (whole events, or a whole JSON body) to be passed on as they are, and
    # the answer whose tokens they are. `stats` may then come after the delta with `finish_reason`.
    raw: bytes | None = None
    answer: int = 0
    network_s: float | None = None  # time on the network, where the model is elsewhere; told once
    # With `GenerationRequest.has_trace`: the text in pieces, each with the drafter whose accepted draft
    # token it came from; None: from the target.
    pieces: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadView:
    """How busy a model is, as decisions see it."""

    num_running: int = 0  # sequences decoding or prefilling in the backend
    num_waiting: int = 0  # admitted, not yet scheduled
    num_queued: int = 0  # not yet admitted
    num_admitted: int = 0  # answers admitted and not ended: known before the engine's next step tells
    num_held: int = 0  # of `num_waiting`, those for whom the backend has no room
    requests_per_s: float = 0.0
    answers_per_s: float = 0.0  # a request may ask for several
    queue_wait_p95_ms: float | None = None
    free_kv_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One line of an explanation: value * coefficient = effect_ms."""

    name: str
    value: float
    coefficient: float
    effect_ms: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a request is expected to cost under one policy. None where no model can say yet."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    output_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One policy that was considered for a request."""

    policy: str
    num_speculative_tokens: int
    is_allowed: bool
    why_not: str | None = None
    predicted: Prediction = field(default_factory=Prediction)
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskEstimate:
    """The task label with a probability for each of `TASKS`. `is_mixed`: too uncertain to be acted
    upon as that task."""

    label: str
    confidence: float
    probabilities: dict[str, float] = field(default_factory=dict)
    is_mixed: bool = False

    @property
    def scope(self) -> str:
        """The task as guards and the engine's planner know it: "" where it is too uncertain."""
        return "" if self.is_mixed else self.label


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Quantiles of the output length, in tokens."""

    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class ShadowDecision:
    """Decided under a rollout's overlay, logged, and not applied."""

    policy: str
    reason: str
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The policy a request runs under, and why: everything `/admin/explain` shows."""

    policy: str
    reason: str
    num_speculative_tokens: int
    is_exact: bool  # an override: use the number as it stands
    task: TaskEstimate
    length: LengthEstimate
    load: LoadView
    predicted: Prediction = field(default_factory=Prediction)
    candidates: tuple[Candidate, ...] = ()
    arm: str | None = None  # candidate, control or shadow of `rollout`
    rollout: str | None = None
    shadow: ShadowDecision | None = None  # what the candidate would have got
    is_pinned: bool = False  # by a rollout: load must not undo it
    is_probe: bool = False  # tries a policy that the guards have shut for the others
    hold_steps: int = 0  # target steps during which the engine's planner must follow it
    explore_cost_s: float = 0.0  # what an exploration is expected to cost


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, from the injected clock."""

    queue_wait_s: float = 0.0  # arrival to first scheduled step: admission + engine queue
    ttft_s: float | None = None
    e2e_s: float = 0.0
    tpot_s: float | None = None  # None for fewer than two tokens


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How a request ended: what metrics, the decision log and the learner get."""

    request: GenerationRequest
    decision: Decision
    outcome: str  # ok, error, cancelled, deadline, refused
    num_prompt_tokens: int
    num_output_tokens: int
    timings: Timings
    stats: tuple[SequenceStats, ...] = ()
    policy_changes: tuple[PolicyChange, ...] = ()
    inter_token_s: tuple[tuple[float, int], ...] = ()  # (gap, tokens in the emission after it)
    network_s: float | None = None  # all answers together, where the model is elsewhere
