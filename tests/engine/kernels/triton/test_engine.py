"""The whole engine on Triton kernels: greedy text is that of the plain path, under every policy."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine.config import DraftModelConfig, NgramConfig
from engine.kernels.triton.ngram import match_ngrams
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.drafter import Drafter
from engine.spec.ngram import NgramDrafter, NgramIndex
from engine.types import EngineRequest, SamplingParams
from tests.engine.harness import drive, make_engine, prompt, request, target


def drafters() -> Mapping[str, Drafter]:
    model = target()
    sizes = {"num_blocks": 64, "block_size": 4}
    draft = DraftModelDrafter(model.first_layers(1), model.spec, DraftModelConfig(), **sizes)
    return {"ngram": NgramDrafter(), "draft": draft}


def requests(num_tokens: int) -> list[EngineRequest]:
    params = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=num_tokens, ignore_eos=True),
    }
    return [
        request(f"{policy} {kind}", prompt(3, 6), sampling, policy, 3)
        for policy in ("baseline", "ngram", "draft")
        for kind, sampling in params.items()
    ]


def test_text_is_the_same_on_triton_and_under_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted where there is no GPU; the tiny model has the real one's every part."""
    expected = drive(make_engine(drafters()), requests(3)).tokens()
    monkeypatch.setenv("SPECGATE_KERNELS", "triton")
    run = drive(make_engine(drafters()), requests(3))
    assert run.tokens() == expected
    assert {record.kernels for record in run.records} == {"attention=triton kv_write=triton verify=triton"}
    for kind in ("greedy", "seeded"):
        assert (
            len({tuple(run.tokens()[f"{policy} {kind}"]) for policy in ("baseline", "ngram", "draft")}) == 1
        )


def test_ngram_match_on_device_is_that_of_the_index(device: torch.device) -> None:
    config = NgramConfig()
    rng = random.Random(1)
    histories = [[rng.randrange(4) for _ in range(rng.randrange(1, 60))] for _ in range(12)]
    padded = torch.full((12, 60), 3, dtype=torch.int32)
    for row, tokens in zip(padded, histories, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    lengths = torch.tensor([len(tokens) for tokens in histories], dtype=torch.int32)
    got = match_ngrams(
        padded.to(device), lengths.to(device), 4, config.prompt_lookup_min, config.prompt_lookup_max
    ).tolist()
    for tokens, (num, *draft) in zip(histories, got, strict=True):
        index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        index.extend(tokens)
        start = index.find(tokens)
        assert draft[:num] == ([] if start is None else tokens[start : start + 4])
