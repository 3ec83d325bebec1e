"""Inputs and outputs of the estimators. Frozen plain data; "no data" is None.

Units are in the names: `_s` seconds, `_tokens` counts of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TASKS = (
    "document_qa",
    "summarization",
    "code_edit",
    "code_completion",
    "chat",
    "reasoning",
    "translation",
    "tool_call",
    "creative_writing",
)
"""The task classes, in the order of every probability vector."""


# --- explanations ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Effect:
    """One term of a prediction: `effect = value * coefficient`, in the explanation's unit."""

    name: str
    value: float
    coefficient: float
    effect: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """A prediction taken apart. The effects add up to `total`, which is in `unit`.

    Models that multiply explain themselves in logarithms: `unit` then starts with "log".
    """

    effects: tuple[Effect, ...]
    total: float
    unit: str


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Two quantiles of a positive quantity; `p50 <= p90`."""

    p50: float
    p90: float


# --- task -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestText:
    """A request as text, before any template: all that the task classifier looks at.

    `user` is the last user message, or the raw prompt of a completion; `history` the turns
    before it, oldest first.
    """

    user: str
    system: str = ""
    history: tuple[str, ...] = ()
    is_raw_prompt: bool = False
    suffix: str | None = None  # fill in the middle
    num_tools: int = 0
    has_response_format: bool = False
    max_tokens: int | None = None  # only where the caller said so


@dataclass(frozen=True, slots=True)
class TaskPrediction:
    """The most probable task. `is_mixed`: too uncertain to be acted upon as that task."""

    label: str
    confidence: float
    probabilities: dict[str, float]  # every task of TASKS; sums to 1
    is_mixed: bool


# --- output length --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LengthFeatures:
    """What is known of a request's output length beforehand."""

    task: str | None  # None: uncertain
    num_prompt_tokens: int
    max_tokens: int | None = None  # the hard ceiling; None: none was asked for
    caller: str = ""
    asked_tokens: float | None = None  # the length the prompt asks for, in tokens


@dataclass(frozen=True, slots=True)
class LengthOutcome:
    """How long an answer was. `is_cut`: it ended at max_tokens, so it wanted to be longer."""

    num_output_tokens: int
    is_cut: bool = False


# --- acceptance -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcceptanceKey:
    """Acceptance is kept per policy, task and sampling band (see `acceptance.sampling_band`)."""

    policy: str
    task: str | None = None  # None: uncertain; the policy's average over tasks
    band: str = "greedy"


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """What one request (or one stretch of it) showed under one policy.

    `num_steps` counts the target steps in which drafting was granted, with or without a draft;
    position 0 of the tuples is the first draft token. `allowed_per_position` counts the drafts that were
    granted a token there, which a drafter need not use; empty: those that had one.
    """

    num_steps: int
    num_drafts: int
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    allowed_per_position: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Expected tokens per step for every depth, with their uncertainty.

    Index K of each tuple is the value for K draft tokens; index 0 is plain decoding (1 token).
    `survival[j]` is the chance that draft token j+1 exists and is accepted.
    """

    key: AcceptanceKey
    survival: tuple[float, ...]
    expected_tokens: tuple[float, ...]
    low_tokens: tuple[float, ...]  # 10 % quantile of the estimate
    high_tokens: tuple[float, ...]  # 90 %
    draft_rate: float  # granted steps that had a draft at all
    drafted_tokens: tuple[float, ...]  # mean draft length per granted step, by K
    start: float  # h: chance that the first draft token is there and accepted
    continuation: float  # b: chance that a further one is, given the one before
    num_steps: float  # discounted evidence; 0 where only the prior speaks


# --- step latency ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftFeatures:
    """One drafter's work in a step. Totals over sequences."""

    method: str
    num_calls: float = 0.0  # sequential draft forwards
    num_sequences: float = 0.0
    num_draft_tokens: float = 0.0
    num_kv_tokens: float = 0.0
    num_fill_tokens: float = 0.0  # context tokens that a cache of its own had to read up on
    num_begun_tokens: float = 0.0  # length of the sequences that got their first draft
    num_begun_fill: float = 0.0  # of these, the tokens it had to read up on
    num_granted_tokens: float = 0.0  # draft tokens that were allowed; 0: as many as were drafted


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """The work of one engine step, known or planned before it runs. Totals over sequences."""

    num_sequences: float  # decoding sequences
    num_tokens: float  # tokens in the target forward: prefill, decode and draft
    num_kv_tokens: float
    num_prefill_tokens: float = 0.0
    num_sampled_rows: float = 0.0  # logits rows with temperature > 0
    drafts: tuple[DraftFeatures, ...] = ()
    num_window_kv_tokens: float = 0.0  # sum over sequences of draft tokens times KV tokens


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How long a step took. `draft_s` is aligned with the features' `drafts`."""

    seconds: float
    draft_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """Predicted duration of a step. `spread_s` is one standard deviation."""

    seconds: float
    spread_s: float
    target_s: float
    draft_s: float
    is_prior: bool  # no step of this kind has been seen yet


@dataclass(frozen=True, slots=True)
class DraftCoefficients:
    """What a drafter's work costs, in seconds per unit."""

    d0_s: float = 0.0  # per sequential call
    d_seq_s: float = 0.0  # per drafting sequence
    d_tok_s: float = 0.0  # per draft token
    d_kv_s: float = 0.0  # per KV token the drafter attends to
    d_fill_s: float = 0.0  # per context token it reads up on
    calls_per_token: float = 0.0  # of one sequence, per granted token: 1 if it never stops, 0 for n-gram
    kv_per_target_kv: float = 0.0  # drafter KV tokens per draft token and target KV token of its sequence
    d_lead_s: float = 0.0  # per step with any calls
    fill_per_token: float = 1.0  # share of a sequence that it reads up on before its first draft
    asked_share: float = 1.0  # of one sequence's drafts, those with any calls

    @property
    def has_calls(self) -> bool:
        """Whether there is a draft model to be called."""
        return self.calls_per_token > 0

    def calls(self, depth: float, num_sequences: float) -> float:
        """Expected calls of a step. They serve all that draft: one is made unless none of them needs it."""
        return depth * _any(self.calls_per_token, num_sequences)

    def asked(self, num_sequences: float) -> float:
        """Chance that a step has any calls: that they come before the target's forward."""
        return _any(self.asked_share, num_sequences) if self.has_calls else 0.0


def _any(chance: float, num: float) -> float:
    """That of `num` independent events of this chance one happens; 0 for none of them."""
    return 1.0 - (1.0 - min(chance, 1.0)) ** num if num > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """The step model as numbers, for the planner and for people.

    decode step:  c0 + c_seq*B + c_tok*min(N, knee) + c_tok_above*max(N - knee, 0) + c_kv*KV + c_win*W
                  + c_sample*R, and c_lead where no draft calls come before the target's forward
    prefill step: p0 + p_tok*(prefill tokens) + p_dec*(other tokens) + p_kv*KV
    and each drafter's own cost on top. All >= 0.
    """

    c0_s: float
    c_seq_s: float
    c_tok_s: float
    c_kv_s: float
    c_sample_s: float
    c_tok_above_s: float
    knee_tokens: float | None  # None: no knee, c_tok holds throughout
    p0_s: float
    p_tok_s: float
    p_dec_s: float
    p_kv_s: float
    c_lead_s: float = 0.0
    c_win_s: float = 0.0
    drafters: dict[str, DraftCoefficients] = field(default_factory=dict)
    relative_spread: float = 0.0  # of decode steps, one standard deviation
    num_steps: int = 0


# --- TTFT and queue wait --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaitFeatures:
    """The load a request meets, and the work its prompt brings."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_queued: int = 0
    requests_per_s: float = 0.0
    prefill_s: float | None = None  # the step model's own guess for this prompt
