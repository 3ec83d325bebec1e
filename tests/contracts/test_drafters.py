"""The drafter contract, run for every method; and proof that the check sees breaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from engine.config import DraftModelConfig, HybridConfig, NgramConfig
from engine.models.tiny import tiny_model
from engine.spec.check_drafter import check_drafter
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.drafter import DraftContext, Drafter
from engine.spec.hybrid import HybridDrafter
from engine.spec.imposed import ImposedDrafter, ImposedDraftModel
from engine.spec.ngram import NgramDrafter
from engine.spec.stub import StubDrafter
from engine.spec.suffix import SuffixDrafter
from engine.spec.tree import EMPTY_TREE, DraftTree

VOCAB = 128


def known_text(context: DraftContext) -> Sequence[int]:
    return [(sum(context.token_ids) + j) % VOCAB for j in range(8)]


def draft_model(num_blocks: int = 200, catch_up_tokens: int = 24, max_model_len: int = 512) -> Drafter:
    target = tiny_model(num_layers=2, vocab_size=VOCAB, max_model_len=max_model_len)
    config = DraftModelConfig(layers_of_target=1, catch_up_tokens=catch_up_tokens)
    return DraftModelDrafter(target.first_layers(1), target.spec, config, num_blocks=num_blocks, block_size=4)


def held_by_ngram(drafter: Drafter) -> int:
    assert isinstance(drafter, NgramDrafter)
    return drafter.num_sequences


def held_by_suffix(drafter: Drafter) -> int:
    assert isinstance(drafter, SuffixDrafter)
    return drafter.num_sequences  # past outputs are kept on purpose, and bounded


def held_by_draft_model(drafter: Drafter) -> int:
    assert isinstance(drafter, DraftModelDrafter)
    drafter.check_integrity()
    return drafter.num_sequences + drafter.blocks.num_used


class Known:
    """A truth that never changes: what a drafter remembers is not the contract's business."""

    def truth(self, context: DraftContext) -> Sequence[int]:
        return known_text(context)

    def observe(self, seq_id: str, token_ids: Sequence[int]) -> None: ...

    def end(self, seq_id: str) -> None: ...


def imposed_model() -> Drafter:
    target = tiny_model(num_layers=2, vocab_size=VOCAB, max_model_len=512)
    config = DraftModelConfig(layers_of_target=1)
    return ImposedDraftModel(
        target.first_layers(1), target.spec, config, [0.9, 0.5], num_blocks=200, block_size=4, answers=Known()
    )


METHODS: dict[str, tuple[Callable[[], Drafter], Callable[[Drafter], int] | None]] = {
    "ngram": (NgramDrafter, held_by_ngram),
    "ngram-1-to-3": (lambda: NgramDrafter(NgramConfig(6, 1, 3)), held_by_ngram),
    "suffix": (SuffixDrafter, held_by_suffix),
    "hybrid": (
        lambda: HybridDrafter(SuffixDrafter(), draft_model(), HybridConfig()),
        lambda drafter: drafter.num_sequences,  # type: ignore[attr-defined]
    ),
    "draft": (draft_model, held_by_draft_model),
    "draft-few-blocks": (lambda: draft_model(num_blocks=24), held_by_draft_model),
    "draft-short-context": (lambda: draft_model(max_model_len=40), held_by_draft_model),
    "stub-right": (lambda: StubDrafter(known_text, VOCAB), None),
    "stub-wrong": (lambda: StubDrafter(known_text, VOCAB, 0), None),
    "stub-right-up-to-2": (lambda: StubDrafter(known_text, VOCAB, 2), None),
    "imposed": (lambda: ImposedDrafter(known_text, VOCAB, [0.9, 0.5]), None),
    "imposed-model": (imposed_model, held_by_draft_model),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_the_contract(method: str) -> None:
    make, held = METHODS[method]
    assert check_drafter(make, VOCAB, held=held) == []


@dataclass
class Faulty:
    """A drafter that breaks one clause."""

    break_with: Callable[[Faulty, DraftContext], DraftTree]
    name: str = "faulty"
    num_speculative_tokens: int = 4
    num_calls: int = 0

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None: ...

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        self.num_calls += 1
        return [self.break_with(self, context) for context in contexts]

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None: ...

    def end(self, seq_id: str) -> None: ...

    def work(self) -> tuple[int, int]:
        return 0, 0


def sane(context: DraftContext, token: int = 1, probs: torch.Tensor | None = None) -> DraftTree:
    if context.max_draft_tokens == 0 or not context.token_ids:
        return EMPTY_TREE
    return DraftTree.chain((token,), probs)


def append_to_context(_: Faulty, context: DraftContext) -> DraftTree:
    context.token_ids.append(1)  # type: ignore[attr-defined]
    return sane(context)


BREACHES: dict[str, tuple[Callable[[Faulty, DraftContext], DraftTree], str]] = {
    "too many": (lambda _, c: DraftTree.chain((1,) * (c.max_draft_tokens + 1)), "granted"),
    "bad token": (lambda _, c: sane(c, VOCAB), "outside the vocabulary"),
    "mutates": (append_to_context, "changed a context"),
    "not empty": (lambda _, c: DraftTree.chain((1,) if c.max_draft_tokens else ()), "no tokens"),
    "no limit": (lambda _, c: DraftTree.chain((1,) if c.token_ids else ()), "max_draft_tokens 0"),
    "unstable": (lambda d, c: sane(c, d.num_calls), "same seed"),
    "bad probs": (lambda _, c: sane(c, 1, torch.full((1, VOCAB), 2.0 / VOCAB)), "no distribution"),
    "nan probs": (lambda _, c: sane(c, 1, torch.full((1, VOCAB), torch.nan)), "no distribution"),
    "impossible token": (lambda _, c: sane(c, 1, torch.eye(VOCAB)[:1]), "probability 0"),
    "child first": (
        lambda _, c: DraftTree((1, 2), (1, -1)) if c.max_draft_tokens > 1 else EMPTY_TREE,
        "does not precede",
    ),
    "twins": (
        lambda _, c: DraftTree((1, 1), (-1, -1)) if c.max_draft_tokens > 1 else EMPTY_TREE,
        "among its siblings",
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_the_check_sees(breach: str) -> None:
    break_with, words = BREACHES[breach]
    assert any(words in fault for fault in check_drafter(lambda: Faulty(break_with), VOCAB))


def test_the_check_sees_what_end_leaves_behind() -> None:
    class Hoarder(Faulty):
        def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
            hoard.append(seq_id)

    hoard: list[str] = []
    faults = check_drafter(lambda: Hoarder(lambda _, c: sane(c)), VOCAB, held=lambda _: len(hoard))
    assert any("are held" in fault for fault in faults)
