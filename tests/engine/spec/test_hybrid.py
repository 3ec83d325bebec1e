"""The hybrid asks the drafter that promises more, and learns within an answer what each brings."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import HybridConfig, SuffixConfig
from engine.spec.drafter import DraftContext
from engine.spec.hybrid import HybridDrafter
from engine.spec.randomness import RandomKey
from engine.spec.stub import StubDrafter
from engine.spec.suffix import SuffixDrafter

MODEL_TOKENS = [90, 91, 92, 93]
REPEATED = [*range(10, 30), 1, 2, *range(10, 22)]
NOVEL = list(range(40, 60))


class Model(StubDrafter):
    """Always drafts the same, and counts for whom."""

    def __init__(self) -> None:
        super().__init__(lambda _: MODEL_TOKENS, 100)
        self.asked: list[str] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list:  # type: ignore[type-arg]
        self.asked += [context.seq_id for context in contexts]
        return super().propose(contexts)

    def work(self) -> tuple[int, int]:
        return 4, 44


def context(seq_id: str, token_ids: list[int]) -> DraftContext:
    return DraftContext(seq_id, token_ids, len(token_ids), 4, 0.0, None, RandomKey(0))


def make(model: Model) -> HybridDrafter:
    return HybridDrafter(SuffixDrafter(SuffixConfig()), model, HybridConfig(assumed_accepted_tokens=1.0))


def test_each_sequence_gets_the_drafter_that_promises_more() -> None:
    model = Model()
    drafter = make(model)
    repeated, novel = drafter.propose([context("repeated", REPEATED), context("novel", NOVEL)])
    assert repeated.token_ids == (22, 23, 24, 25)
    assert list(novel.token_ids) == MODEL_TOKENS
    assert model.asked == ["novel"]
    assert drafter.work() == (4, 44)
    drafter.propose([context("repeated", REPEATED)])
    assert drafter.work() == (0, 0), "the model was not asked"


def test_a_match_that_keeps_failing_gives_way_to_the_model() -> None:
    model = Model()
    drafter = make(model)
    tokens = list(REPEATED)
    who = []
    for _ in range(12):
        (tree,) = drafter.propose([context("a", tokens)])
        is_model = list(tree.token_ids) == MODEL_TOKENS
        who.append(is_model)
        committed = (
            [*MODEL_TOKENS, 5] if is_model else [2, *range(10, 22)]
        )  # the match is there again, and wrong
        drafter.observe("a", committed, 4 if is_model else 0)
        tokens = [*tokens, *committed, *range(10, 22)] if is_model else tokens + committed
        if is_model:
            drafter.observe("a", list(range(10, 22)), 0)
    assert not who[0]
    assert who[-1]


def test_a_model_that_keeps_failing_gives_way_to_the_match() -> None:
    model = Model()
    drafter = HybridDrafter(SuffixDrafter(), model, HybridConfig(assumed_accepted_tokens=8.0))
    tokens = list(REPEATED)
    who = []
    for step in range(40):
        (tree,) = drafter.propose([context("a", tokens)])
        is_model = list(tree.token_ids) == MODEL_TOKENS
        who.append(is_model)
        committed = [22 + step % 8]
        drafter.observe("a", committed, 0 if is_model else 1)
        tokens += committed
    assert who[0]
    assert not who[-1]


def test_end_frees_both() -> None:
    drafter = make(Model())
    drafter.propose([context("a", REPEATED)])
    drafter.end("a")
    drafter.end("a")
    assert drafter.num_sequences == 0


def test_what_a_match_brought_is_not_told_as_the_models() -> None:
    class Listening(Model):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[int] = []

        def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
            self.heard.append(num_accepted)
            super().observe(seq_id, token_ids, num_accepted)

    model = Listening()
    drafter = make(model)
    drafter.propose([context("repeated", REPEATED), context("novel", NOVEL)])
    drafter.observe("repeated", [22, 23, 24], 2)
    drafter.observe("novel", [90, 91, 5], 2)
    assert model.heard == [0, 2]
