"""Data that crosses the engine's border: requests in, step results out. No torch here.

Everything is plain data (ints, floats, strings, tuples) so that it can be sent between
processes as it is. Absence is `None`, never -1 or 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

BASELINE = "baseline"
"""The name of decoding without a drafter: zero draft tokens."""

MIN_TEMPERATURE = 1e-5
"""Below it sampling is greedy: no second token has a chance, and float32 could not divide by it."""


class FinishReason(StrEnum):
    """Why a sequence ended, as the engine sees it (stop strings are text, hence not here)."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"
    ERROR = "error"


class AcceptRule(StrEnum):
    """How sampled draft tokens are accepted; all are lossless. See `engine.spec.verify`."""

    KEYED = "keyed"  # draw from the target with noise keyed by (seed, position), accept iff equal
    RATIO = "ratio"  # accept with min(1, p/q), else sample the residual (Leviathan et al. 2023)
    BLOCK = "block"  # joint verification of the chain (Sun et al., arXiv:2403.10444)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the target's logits.

    Processors run in this order: min_tokens mask, logit_bias, repetition / frequency / presence
    penalties, grammar, temperature, min_p, top_k, top_p. A temperature of 0 (or below `MIN_TEMPERATURE`) is
    greedy: the argmax of the logits after bias and penalties, lowest token id on an exact tie.
    """

    temperature: float = 1.0
    top_p: float = 1.0  # 1.0 keeps everything
    top_k: int = 0  # 0 keeps everything
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    num_logprobs: int | None = None  # None: none; 0: the chosen token only; n: and the n best
    has_prompt_logprobs: bool = False  # logprobs of the prompt tokens too (`echo` with logprobs)
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        """True when the answer is a function of the logits alone."""
        return self.temperature < MIN_TEMPERATURE


@dataclass(frozen=True, slots=True)
class PolicyAssignment:
    """Which speculation method a request was given, before the planner has its say each step.

    `is_exact` marks an override: the planner must use `num_speculative_tokens` as it stands and
    not as a ceiling. `is_pinned` marks a choice that load must not undo (an override, an arm of a
    rollout), `is_probe` a request that tries a policy which is shut for the others. `hold_steps`:
    the assignment stands for that many target steps, after which the planner may choose (an
    exploration teaches nothing if it is cut short). Without `may_probe` nothing is tried on it.
    """

    method: str = BASELINE
    num_speculative_tokens: int = 0
    is_exact: bool = False
    is_pinned: bool = False
    is_probe: bool = False
    hold_steps: int = 0
    may_probe: bool = True


@dataclass(frozen=True, slots=True)
class SchemaSource:
    """A JSON schema as text, and the name by which a refusal calls it."""

    text: str
    param: str


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output must look like: Lark in llguidance's dialect, with a rule `start`.

    It refers to `schemas[i]` as `@schema_i`. `param` names it in a refusal.
    """

    lark: str
    schemas: tuple[SchemaSource, ...] = ()
    param: str = "grammar"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to be continued. `n` answers are `n` requests (the prefix cache shares the prompt)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    policy: PolicyAssignment = field(default_factory=PolicyAssignment)
    priority: int = 0  # lower runs first; equal priorities are served in order of arrival
    cache_salt: str = ""  # prefix blocks are shared only between requests of equal salt
    label: str = ""  # opaque to the engine; handed to the planner and the step records
    grammar: GrammarSpec | None = None  # None: the output is free


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token under the target's raw distribution, with the n best."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """The planner changed a running request's method before output token `token_index`."""

    token_index: int
    policy: str
    reason: str


@dataclass(frozen=True, slots=True)
class MethodCounts:
    """What one drafter did for one sequence. Position 0 of the tuples is the first draft token.

    `accepted / allowed` is the survival to a position, not the acceptance once it was reached: a drafter
    that stops early by itself has no token there, which is as good as a refused one.
    """

    method: str
    num_steps: int = 0  # target steps in which drafting was granted, with or without a draft
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # drafts whose token at this depth was accepted
    drafted_per_position: tuple[int, ...] = ()  # drafts that had a token at this depth, reached or not
    refused_per_position: tuple[int, ...] = ()  # drafts whose first refused token stood at this depth
    allowed_per_position: tuple[int, ...] = ()  # drafts granted a token there; empty: unknown


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A sequence's share of the engine's step time while one method had its turn; in seconds.

    A step's forward and verify time is shared by the tokens that each sequence had in it, a drafter's time
    equally by the sequences it worked for. So the shares of all sequences add up to the steps.
    """

    method: str  # baseline for plain decode steps and for prompt chunks
    num_tokens: int = 0  # emitted in decode steps; what comes with a prompt's last chunk is not counted
    draft_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    prefill_s: float = 0.0  # of forward_s and verify_s: prompt chunks

    @property
    def seconds(self) -> float:
        """All parts; `prefill_s` is within them."""
        return self.draft_s + self.forward_s + self.verify_s


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """True counts of one finished sequence. Integers and seconds; ratios are the reader's."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_output_tokens: int = 0
    num_target_steps: int = 0  # target forwards that emitted at least one token of this sequence
    num_drafts: int = 0  # non-empty drafts verified
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # drafts whose token at this depth was accepted
    # Drafts whose token at this depth was decided upon: all before it stood, and no stop cut it off.
    drafted_per_position: tuple[int, ...] = ()
    num_preemptions: int = 0
    queue_wait_s: float = 0.0  # added to first scheduled step
    draft_s: float = 0.0  # this sequence's share of drafting time
    policy_changes: tuple[PolicyChange, ...] = ()
    by_method: tuple[MethodCounts, ...] = ()  # the drafts' counts apart, where a drafter had its turn
    in_hindsight: tuple[MethodCounts, ...] = ()  # what drafters would have done where they had none
    device: tuple[DeviceUse, ...] = ()  # by method


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step did for one request. `stats` comes with the finish reason."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token when asked for, else empty
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # with the first tokens, when asked for
    num_accepted_tokens: int = 0  # of token_ids, how many were draft tokens; they come first
    num_draft_tokens: int = 0  # draft tokens verified for this sequence in this step
    draft_method: str | None = None  # who was allowed to draft in this step
    finish_reason: FinishReason | None = None
    stats: SequenceStats | None = None
    error: str | None = None  # with FinishReason.ERROR
    queue_wait_s: float | None = None  # added to first scheduled step; with the first tokens
    num_granted_tokens: int = 0  # draft tokens that were allowed in this step


@dataclass(frozen=True, slots=True)
class DrafterError:
    """A drafter failed in a step; its sequences went on without a draft."""

    method: str
    kind: str  # exception, oom, timeout, invalid_draft, nan, verify_mismatch
    message: str


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One drafter's work within one step: the regressors of the latency model."""

    method: str
    num_calls: int = 0  # sequential draft forwards (0 for n-gram)
    num_sequences: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_kv_tokens: int = 0
    seconds: float = 0.0
    num_fill_tokens: int = 0  # context tokens a drafter with a cache of its own had to read up on
    num_begun_tokens: int = 0  # length of the sequences that got their first draft of it
    num_begun_fill: int = 0  # of these, the tokens it had to read up on, in this step and those before
    num_granted_tokens: int = 0  # draft tokens that were allowed, used or not


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one `Engine.step` did and how long each part took."""

    step: int
    started_s: float  # the injected clock
    seconds: float
    kind: str  # prefill, decode, verify, mixed
    num_sequences: int
    num_decode_sequences: int
    num_tokens: int  # tokens in the target forward, drafts included
    num_prefill_tokens: int
    num_kv_tokens: int  # sum over sequences of the KV tokens attended to
    num_logits_rows: int
    num_sampled_rows: int  # logits rows with temperature > 0
    num_emitted_tokens: int
    schedule_s: float
    draft_s: float
    forward_s: float
    verify_s: float
    drafts: tuple[DraftWork, ...] = ()
    drafter_errors: tuple[DrafterError, ...] = ()
    num_preemptions: int = 0
    num_planner_errors: int = 0
    kernels: str = ""  # which implementations ran, e.g. "attention=cpu verify=reference"
    is_warm_up: bool = False  # synthetic work, run before any request
    num_window_kv_tokens: int = 0  # sum over sequences of their draft tokens times the KV tokens attended to


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of how busy the engine is."""

    num_running: int
    num_waiting: int
    num_free_blocks: int  # free to take, the cached ones among them
    num_cached_blocks: int  # of the free ones, those that hold reusable prefixes
    num_used_blocks: int
    num_total_blocks: int
    num_held: int = 0  # of `num_waiting`, those who wait for somebody else's end and not for the next step


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything one `Engine.step` has to say."""

    outputs: tuple[SequenceOutput, ...]
    record: StepRecord | None  # None when there was nothing to run
    load: EngineLoad
