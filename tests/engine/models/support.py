"""What several model tests need: batches over scattered blocks, and small GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.models.families import FAMILIES
from engine.models.llama import CausalLM
from engine.models.spec import ModelSpec

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_batch(
    pieces: Sequence[tuple[Sequence[int], int]], tables: Sequence[Sequence[int]], block_size: int
) -> ForwardBatch:
    """pieces: per sequence its new token ids and the position of the first of them."""
    positions = [torch.arange(start, start + len(ids)) for ids, start in pieces]
    slots = [
        torch.tensor(table)[at // block_size] * block_size + at % block_size
        for table, at in zip(tables, positions, strict=True)
    ]
    lengths = [len(ids) for ids, _ in pieces]
    width = max(len(table) for table in tables)
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    num_tokens = sum(lengths)
    return ForwardBatch(
        token_ids=torch.tensor([token for ids, _ in pieces for token in ids]),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_start=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        context_lens=torch.tensor([start + len(ids) for ids, start in pieces], dtype=torch.int32),
        block_tables=torch.tensor(padded, dtype=torch.int32),
        logits_rows=torch.arange(num_tokens),
    )


def one_shot_logits(model: CausalLM, token_ids: Sequence[int], block_size: int = 16) -> torch.Tensor:
    """Logits of every position from one forward over fresh blocks, [tokens, vocab]."""
    num_blocks = -(-len(token_ids) // block_size)
    with torch.inference_mode():
        cache = model.new_cache(num_blocks + 1, block_size)
        batch = make_batch([(token_ids, 0)], [list(range(num_blocks, 0, -1))], block_size)
        return model.logits(model.forward(batch, cache))


def random_ids(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Token ids, a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


def gguf_name(name: str) -> str:
    """A Hugging Face tensor name as llama.cpp's converter writes it."""
    stem, suffix = name.rsplit(".", 1)
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Llama's q and k rows in the order llama.cpp's converter writes them."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    spec: ModelSpec,
    state: dict[str, torch.Tensor],
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    rope_freqs: Sequence[float] | None = None,
    extra: dict[str, str | int | float] | None = None,
) -> Path:
    """A GGUF file as a converter would write it: matrices quantised, vectors float32."""
    family = next(family for family in FAMILIES if family.name == spec.family)
    writer = gguf.GGUFWriter(path, family.gguf_architecture)
    writer.add_name("tiny")
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        name = key.format(arch=family.gguf_architecture)
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(name, value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    for name, tensor in state.items():
        values = tensor.numpy()
        if family.gguf_architecture == "llama" and ".q_proj." in name:
            values = permute(values, spec.num_heads)
        if family.gguf_architecture == "llama" and ".k_proj." in name:
            values = permute(values, spec.num_kv_heads)
        if values.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, quant), raw_dtype=quant)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
