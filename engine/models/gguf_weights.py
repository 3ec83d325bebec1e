"""Weights from a GGUF file, dequantised one tensor at a time by the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from engine.errors import ModelSourceError
from engine.models.families import family_of_gguf
from engine.models.gguf_file import GgufHeader, GgufTensor
from engine.models.spec import ModelSpec
from engine.models.spec_gguf import ROPE_FREQS
from engine.models.weights import EMBEDDING, FINAL_NORM, HEAD, layer_prefix

_GLOBAL_NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufWeights:
    """Tensors of one GGUF file under this package's names, in float32."""

    def __init__(self, header: GgufHeader, spec: ModelSpec) -> None:
        self._header = header
        self._spec = spec
        self._is_permuted = family_of_gguf(header.metadata["general.architecture"]).is_gguf_permuted
        self._tensors = {
            own_name(name): tensor for name, tensor in header.tensors.items() if name != ROPE_FREQS
        }
        self._data = np.memmap(header.path, mode="r", dtype=np.uint8)

    def names(self) -> frozenset[str]:
        """All tensor names; one this package has no name for keeps its own."""
        return frozenset(self._tensors)

    def load(self, name: str) -> torch.Tensor:
        """One tensor, dequantised to float32, its rotary rows in this package's order."""
        values = _dequantise(self._tensors[name], self._data)
        # What is stored as float32 comes as a view of the read-only file; torch wants its own memory.
        weight = torch.from_numpy(np.require(values, requirements=("C", "W")))
        if self._is_permuted and ".q_proj." in name:
            return unpermute(weight, self._spec.num_heads)
        if self._is_permuted and ".k_proj." in name:
            return unpermute(weight, self._spec.num_kv_heads)
        return weight


def own_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor, or the name itself where there is none."""
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    parts = gguf_name.split(".")  # blk.0.attn_q.weight
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER_NAMES:
        return f"{layer_prefix(int(parts[1]))}{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return gguf_name


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """From interleaved rotary rows (0, 1 a pair) to split halves (0, head_dim / 2 a pair).

    llama.cpp's converter permutes Llama's q and k rows the other way. weight: [rows, ...].
    """
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])  # [heads, pairs, 2, ...]
    return pairs.transpose(1, 2).reshape(weight.shape)


def _dequantise(tensor: GgufTensor, data: np.memmap) -> np.ndarray:
    try:
        kind = gguf.GGMLQuantizationType(tensor.quant_type)
        block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(tensor.shape)) // block_size * type_size
        raw = data[tensor.offset : tensor.offset + num_bytes]
        if len(raw) != num_bytes:
            raise ModelSourceError(f"The GGUF file ends within {tensor.name}; download the file again.")
        rows = raw.reshape(*tensor.shape[:-1], -1)
        return np.asarray(gguf.dequantize(rows, kind), dtype=np.float32).reshape(tensor.shape)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelSourceError(
            f"The GGUF tensor {tensor.name} is quantised in a way that cannot be read (type"
            f" {tensor.quant_type}: {error}); use a file with another quantisation, e.g. Q8_0 or Q4_K."
        ) from error
