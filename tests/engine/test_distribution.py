"""Sampled answers follow the target's distribution through the whole engine, drafts or not."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from scipy import stats

from engine.config import DraftModelConfig
from engine.models.tiny import tiny_model
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.drafter import Drafter
from engine.types import AcceptRule, SamplingParams
from tests.engine.harness import drive, make_engine, reference_logits, request
from tests.engine.heads import head_drafter

VOCAB = 8
PROMPT = (3, 5, 4)
NUM_ANSWERS = 4000
LENGTH = 3
PARAMS = SamplingParams(temperature=0.8, top_k=6, max_tokens=LENGTH, ignore_eos=True)


def next_probabilities(token_ids: tuple[int, ...]) -> torch.Tensor:
    """The target's distribution after temperature and top-k, written down anew: [VOCAB] float64."""
    model = tiny_model(vocab_size=VOCAB)
    scores = reference_logits(model, token_ids)[-1].double() / PARAMS.temperature
    scores[scores < scores.topk(PARAMS.top_k).values[-1]] = -torch.inf
    return scores.softmax(0)


def expected_counts() -> dict[tuple[int, ...], float]:
    counts = {}
    for answer in product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for n, token in enumerate(answer):
            chance *= float(next_probabilities(PROMPT + answer[:n])[token]) if chance else 0.0
        counts[answer] = chance * NUM_ANSWERS
    return counts


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ("baseline", AcceptRule.RATIO),
        ("draft", AcceptRule.RATIO),
        ("draft", AcceptRule.BLOCK),
        ("draft_head", AcceptRule.RATIO),  # which drafts half of the vocabulary only
        ("draft_head", AcceptRule.BLOCK),
    ],
)
def test_answers_follow_the_targets_distribution(policy: str, rule: AcceptRule) -> None:
    model = tiny_model(vocab_size=VOCAB)
    draft = tiny_model(seed=3, vocab_size=VOCAB, num_layers=1)
    drafter = DraftModelDrafter(draft, model.spec, DraftModelConfig(), num_blocks=256, block_size=4)
    drafters: dict[str, Drafter] = {"draft": drafter, "draft_head": head_drafter(model, num_blocks=512)}
    engine = make_engine(drafters, model=model, accept_rule=rule, max_batch_tokens=512)
    run = drive(engine, [request(f"{n}", PROMPT, PARAMS, policy) for n in range(NUM_ANSWERS)])
    seen = Counter(tuple(tokens) for tokens in run.tokens().values())
    expected = expected_counts()
    assert all(expected[answer] > 0 for answer in seen)
    rare = [answer for answer, count in expected.items() if count < 5]  # one cell for all of them
    cells = [(seen[a], count) for a, count in expected.items() if count >= 5]
    cells.append((sum(seen[a] for a in rare), sum(expected[a] for a in rare)))
    statistic = sum((got - count) ** 2 / count for got, count in cells)
    assert stats.chi2.sf(statistic, len(cells) - 1) > 1e-3
    if policy != "baseline":
        drafted = sum(work.num_draft_tokens for record in run.records for work in record.drafts)
        accepted = sum(work.num_accepted_tokens for record in run.records for work in record.drafts)
        assert 0.05 * drafted < accepted < 0.95 * drafted  # both outcomes were at work
