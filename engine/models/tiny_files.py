"""A tiny random model as a real model folder, tokenizer and chat template included."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.models.families import FAMILIES
from engine.models.rope import LinearScaling, Llama3Scaling
from engine.models.spec import ModelSpec
from engine.models.tiny import random_weights, tiny_spec

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 (bos), 2 (eos)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = ("Ġ t", "h e", "Ġ a", "i n", "Ġt he", "r e", "o n", "Ġ Ġ", "e r", "ĠĠ ĠĠ", "e n", "in g", "Ġ s")


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer: any text can be encoded, and decodes to itself."""
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The config.json that says the same as `spec`."""
    family = next(family for family in FAMILIES if family.name == spec.family)
    return {
        "architectures": [family.hf_architecture],
        "model_type": family.name,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_model_len,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "rope_scaling": _rope_scaling(spec),
        "attention_bias": spec.has_output_bias,
        "mlp_bias": spec.has_mlp_bias,
        "sliding_window": None,
        "tie_word_embeddings": spec.is_tied,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": sorted(spec.eos_token_ids),
        "torch_dtype": "float32",
    }


def save_model(folder: Path, spec: ModelSpec, seed: int = 0) -> Path:
    """Write config.json and random float32 weights for `spec`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(spec), indent=1), encoding="utf-8")
    save_file(random_weights(spec, seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def save_tiny_model(
    folder: Path, family: str = "llama", seed: int = 0, *, num_layers: int = 2, max_model_len: int = 512
) -> Path:
    """Write a whole model folder with `tiny_tokenizer`, fit to be served; returns the folder."""
    tokenizer = tiny_tokenizer()
    spec = tiny_spec(
        family,
        vocab_size=tokenizer.get_vocab_size(),
        num_layers=num_layers,
        max_model_len=max_model_len,
    )
    save_model(folder, spec, seed)
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos = SPECIAL_TOKENS[1], SPECIAL_TOKENS[2]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return folder


def _rope_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    match spec.rope.scaling:
        case None:
            return None
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {"rope_type": "llama3", **asdict(scaling)}
        case other:
            raise ValueError(f"config.json cannot express {other}")
