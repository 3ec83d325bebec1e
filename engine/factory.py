"""From an `EngineConfig` to a running engine: loads the target and the drafters named there."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from engine.config import DraftModelConfig, EngineConfig, HybridConfig, SuffixConfig
from engine.engine import Engine
from engine.errors import DrafterMismatch, ModelSourceError, RequestRefused
from engine.grammar.compiler import GrammarCompiler
from engine.models.draft_head import is_draft_head, load_draft_head
from engine.models.interface import LanguageModel
from engine.models.llama import Progress
from engine.models.registry import load_model
from engine.models.source import resolve
from engine.models.tokenizer import load_tokenizer
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.drafter import Drafter
from engine.spec.head_drafter import DraftHeadDrafter
from engine.spec.hybrid import HybridDrafter
from engine.spec.imposed import ImposedDraftHead, ImposedDraftModel
from engine.spec.ngram import NgramDrafter
from engine.spec.planner import SpecPlanner
from engine.spec.suffix import SuffixDrafter
from engine.spec.vocabulary import require_same_tokens


def build_engine(
    config: EngineConfig,
    planner: SpecPlanner,
    clock: Callable[[], float],
    seeds: Callable[[], int],
    progress: Progress | None = None,
) -> Engine:
    """Load everything `config` names. Raises ModelSourceError or DrafterMismatch in one sentence."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    target = load_model(
        config.model,
        device=config.device,
        dtype=config.dtype,
        progress=progress,
        max_model_len=config.max_model_len,
    )
    drafters = build_drafters(config, target, progress)
    _give_back_heap()
    grammars = build_grammars(config.model, target)
    return Engine(config, target, drafters, planner, clock, seeds, grammars)


def _give_back_heap() -> None:
    """What unpacking weights has left of the heap goes back to the system before the KV cache takes more:
    some 200 MB of a first start. Where the C library keeps it, nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def build_grammars(source: str, target: LanguageModel) -> GrammarCompiler:
    """Grammars over the tokens of the model that `source` names. Nothing is read yet."""

    def tokenizer() -> str:
        try:
            return load_tokenizer(resolve(source)).to_str()
        except ModelSourceError as error:
            raise RequestRefused(f"no format can be kept without a tokenizer: {error}", "model") from error

    return GrammarCompiler(tokenizer, target.spec.vocab_size, frozenset(target.spec.eos_token_ids))


def build_drafters(
    config: EngineConfig,
    target: LanguageModel,
    progress: Progress | None = None,
    loaded: Mapping[str, Drafter] | None = None,
) -> dict[str, Drafter]:
    """The drafters of `config` for `target`, by method name; those in `loaded` are taken as they are.

    Raises ModelSourceError for a draft model that cannot be loaded, DrafterMismatch for one that
    does not fit the target.
    """
    drafters: dict[str, Drafter] = {}
    loaded = loaded or {}
    if config.ngram is not None:
        drafters["ngram"] = loaded.get("ngram") or NgramDrafter(config.ngram)
    if config.suffix is not None:
        drafters["suffix"] = loaded.get("suffix") or SuffixDrafter(config.suffix)
    if config.draft_model is not None:
        draft = loaded.get("draft") or _build_draft_model(config, config.draft_model, target, progress)
        drafters["draft"] = draft
    if config.hybrid is not None:
        drafters["hybrid"] = loaded.get("hybrid") or _build_hybrid(config, config.hybrid, drafters)
    return drafters


def keep_drafters(engine: Engine, methods: Collection[str]) -> None:
    """Have `engine` keep those of its configured drafters that are named: the others go, and missing
    ones are loaded, which the requests that run wait for.

    Raises as `build_drafters` does; then nothing has changed.
    """
    config = engine.config
    wanted = replace(
        config,
        ngram=config.ngram if "ngram" in methods else None,
        suffix=config.suffix if "suffix" in methods else None,
        draft_model=config.draft_model if "draft" in methods else None,
        hybrid=config.hybrid if "hybrid" in methods else None,
    )
    engine.set_drafters(build_drafters(wanted, engine.target, loaded=engine.drafters))
    if engine.target.device.type == "cuda":
        torch.cuda.empty_cache()


def _build_hybrid(config: EngineConfig, hybrid: HybridConfig, loaded: Mapping[str, Drafter]) -> HybridDrafter:
    if "draft" not in loaded:
        raise DrafterMismatch("`hybrid` needs a `draft_model`; set one, or leave hybrid out")
    suffix = loaded.get("suffix")
    past = suffix.past if isinstance(suffix, SuffixDrafter) else None
    settings = config.suffix or SuffixConfig(share_past_outputs=hybrid.share_past_outputs)
    return HybridDrafter(SuffixDrafter(settings, past), loaded["draft"], hybrid)


def _build_draft_model(
    config: EngineConfig, draft: DraftModelConfig, target: LanguageModel, progress: Progress | None
) -> Drafter:
    if (draft.source is None) == (draft.layers_of_target is None):
        raise DrafterMismatch("the draft model needs exactly one of `source` and `layers_of_target`")
    if config.imposed is not None:
        draft = replace(draft, min_confidence=0.0)  # its own confidence says nothing of imposed tokens
    if draft.source is not None and is_draft_head(draft.source):
        return _build_draft_head(config, draft, target)
    if draft.source is not None:
        model = load_model(draft.source, device=config.device, dtype=config.dtype, progress=progress)
        _check_tokens(draft.source, config.model)
    else:
        assert draft.layers_of_target is not None
        if not 1 <= draft.layers_of_target <= target.spec.num_layers:
            raise DrafterMismatch(
                f"layers_of_target is {draft.layers_of_target}; it must be 1 to {target.spec.num_layers}"
            )
        model = target.first_layers(draft.layers_of_target)
    num_blocks = draft.num_blocks or config.num_blocks
    if config.imposed is not None:
        return ImposedDraftModel(
            model,
            target.spec,
            draft,
            config.imposed.acceptance,
            num_blocks=num_blocks,
            block_size=config.block_size,
        )
    return DraftModelDrafter(model, target.spec, draft, num_blocks=num_blocks, block_size=config.block_size)


def _build_draft_head(
    config: EngineConfig, draft: DraftModelConfig, target: LanguageModel
) -> DraftHeadDrafter:
    assert draft.source is not None
    head = load_draft_head(draft.source, target)
    num_blocks = draft.num_blocks or config.num_blocks
    if config.imposed is not None:
        acceptance = config.imposed.acceptance
        return ImposedDraftHead(head, draft, acceptance, num_blocks=num_blocks, block_size=config.block_size)
    return DraftHeadDrafter(head, draft, num_blocks=num_blocks, block_size=config.block_size)


def _check_tokens(draft: str, target: str) -> None:
    """Raises DrafterMismatch where both models come with a tokenizer and the two differ."""
    try:
        vocabularies = [load_tokenizer(resolve(source)).get_vocab() for source in (draft, target)]
    except ModelSourceError:
        return  # weights alone: the size of the vocabulary has to do
    require_same_tokens(draft, vocabularies[0], target, vocabularies[1])
