"""A tiny random draft head, made without files."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.config import DraftModelConfig
from engine.models.draft_head import DraftHead, DraftHeadConfig, head_spec
from engine.models.interface import LanguageModel
from engine.models.weights import DictWeights, head_shapes
from engine.spec.head_drafter import DraftHeadDrafter


def head_weights(
    model: LanguageModel, seed: int = 0, num_layers: int = 1, num_input_tokens: int = 2
) -> dict[str, torch.Tensor]:
    """Random weights, scaled so that states keep unit size."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        return 1.0 + 0.1 * noise if name.endswith("norm.weight") else noise / math.sqrt(shape[-1])

    shapes = head_shapes(head_spec(model.spec, num_layers), num_input_tokens)
    return {name: draw(name, shape) for name, shape in shapes.items()}


def tiny_head(
    model: LanguageModel,
    token_ids: Sequence[int] | None = None,
    *,
    context_tokens: int = 16,
    weights: dict[str, torch.Tensor] | None = None,
    num_input_tokens: int = 2,
) -> DraftHead:
    """A head for `model` that drafts `token_ids`; None: every other token."""
    spec = head_spec(model.spec)
    ids = tuple(range(0, spec.vocab_size, 2) if token_ids is None else token_ids)
    config = DraftHeadConfig(
        num_hidden_layers=1,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        target=spec.name,
        context_tokens=context_tokens,
        draft_token_ids=ids,
        num_input_tokens=num_input_tokens,
    )
    weights = weights or head_weights(model, num_input_tokens=num_input_tokens)
    return DraftHead(model, spec, DictWeights(weights), config)


def head_drafter(
    model: LanguageModel,
    token_ids: Sequence[int] | None = None,
    *,
    context_tokens: int = 16,
    num_blocks: int = 64,
    catch_up_tokens: int = 256,
    name: str = "draft",
) -> DraftHeadDrafter:
    """A drafter on a tiny head."""
    head = tiny_head(model, token_ids, context_tokens=context_tokens)
    config = DraftModelConfig(catch_up_tokens=catch_up_tokens)
    return DraftHeadDrafter(head, config, num_blocks=num_blocks, block_size=4, name=name)
