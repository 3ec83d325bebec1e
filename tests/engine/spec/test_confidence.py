"""Drafts end where they are unsure, learn how far their confidence is to be trusted, and lose nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy import stats

from engine.config import DraftModelConfig
from engine.models.tiny import tiny_model
from engine.spec.confidence import ConfidenceStop
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.drafter import Drafter
from engine.spec.head_drafter import DraftHeadDrafter
from engine.types import SamplingParams
from tests.engine.harness import GREEDY, drive, make_engine, prompt, request, target
from tests.engine.heads import tiny_head


def logits(*tops: float) -> torch.Tensor:
    """Rows whose largest probability is as given, the rest being spread over three tokens."""
    return torch.tensor([[top, *[(1 - top) / 3] * 3] for top in tops]).log()


def test_a_draft_goes_on_while_all_of_it_is_likely() -> None:
    stop = ConfidenceStop(0.5)
    assert stop.going_on(["a", "b", "c"], logits(0.9, 0.4, 0.6), is_first=True) == [0, 2]
    assert stop.going_on(["a", "c"], logits(0.8, 0.8), is_first=False) == [0]  # 0.72 and 0.48
    assert stop.going_on(["a"], logits(0.6), is_first=False) == []
    stop.observe("a", 2)
    assert stop.going_on(["a"], logits(0.6), is_first=True) == [0], "the next draft begins anew"


def test_confidence_is_trusted_as_far_as_it_came_true() -> None:
    stop = ConfidenceStop(0.5)
    for _ in range(30):
        stop.going_on(["boaster", "modest"], logits(0.7, 0.7), is_first=True)
        stop.observe("modest", 1)
    assert stop.going_on(["boaster", "modest", "new"], logits(0.7, 0.45, 0.45), is_first=True) == [1]
    stop.end("boaster")
    assert stop.going_on(["boaster"], logits(0.7), is_first=True) == [0], "forgotten"


def test_zero_never_stops_and_bad_values_are_refused() -> None:
    assert ConfidenceStop(0.0).going_on(["a"], logits(0.25), is_first=True) == [0]
    with pytest.raises(ValueError, match="below 1"):
        ConfidenceStop(1.0)


def drafters(min_confidence: float) -> dict[str, Drafter]:
    config = DraftModelConfig(min_confidence=min_confidence)
    sizes = {"num_blocks": 64, "block_size": 4}
    other = tiny_model("qwen3", seed=7, vocab_size=target().spec.vocab_size, num_layers=1)
    return {
        "draft": DraftModelDrafter(other, target().spec, config, **sizes),
        "head": DraftHeadDrafter(tiny_head(target()), config, name="head", **sizes),
    }


@pytest.mark.parametrize("policy", ["draft", "head"])
def test_the_text_stays_and_drafts_get_shorter(policy: str) -> None:
    asked = [prompt(n, 5 + n) for n in range(12)]
    texts, drafted = [], []
    for min_confidence in (0.0, 0.05, 0.5):
        run = drive(
            make_engine(drafters(min_confidence)),
            [request(str(n), p, GREEDY, policy) for n, p in enumerate(asked)],
        )
        texts.append(run.tokens())
        drafted.append(sum(d.stats.num_draft_tokens for d in run.finished.values() if d.stats))
    assert texts[0] == texts[1] == texts[2]
    assert drafted[0] > drafted[1] > drafted[2]


def test_sampled_text_keeps_its_distribution() -> None:
    """Two tokens, drafted where the head is sure enough: about half of the drafts end early."""
    model = tiny_model(vocab_size=8)
    head = tiny_head(model)
    params = SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True)
    counts = {}
    for min_confidence in (0.0, 0.12):
        config = DraftModelConfig(min_confidence=min_confidence)
        drafter = DraftHeadDrafter(head, config, num_blocks=256, block_size=4)
        run = drive(
            make_engine({"draft": drafter}, model=model, max_batch_tokens=512),
            [request(str(n), (3, 5, 4), params, "draft") for n in range(1500)],
        )
        counts[min_confidence] = Counter(tuple(t) for t in run.tokens().values())
    cells = [c for c in counts[0.0] | counts[0.12] if counts[0.0][c] + counts[0.12][c] >= 20]
    statistic = sum(
        (counts[0.0][c] - counts[0.12][c]) ** 2 / (counts[0.0][c] + counts[0.12][c]) for c in cells
    )
    assert stats.chi2.sf(statistic, len(cells)) > 1e-4
