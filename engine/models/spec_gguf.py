"""`ModelSpec` from GGUF metadata. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import ModelSourceError
from engine.models.families import Family, family_of_gguf
from engine.models.gguf_file import GgufHeader, read_header
from engine.models.rope import LinearScaling, RopeSpec, StoredDivisors
from engine.models.source import ModelFiles
from engine.models.spec import ModelSpec
from engine.models.tokenizer_settings import settings_from_gguf

ROPE_FREQS = "rope_freqs.weight"
_F32 = 0


def spec_from_gguf(files: ModelFiles) -> ModelSpec:
    """Read the metadata of one GGUF file."""
    header = read_header(files.weights[0])
    try:
        return spec_from_header(header, files.name)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ModelSourceError(
            f"The metadata of {header.path} are broken ({error}); download it again."
        ) from error


def spec_from_header(header: GgufHeader, name: str) -> ModelSpec:
    """As `spec_from_gguf`, for a header that was already read."""
    metadata = _Metadata(header)
    family = family_of_gguf(metadata.architecture)
    if metadata.get("split.count", 0) > 1:
        raise ModelSourceError(
            f"{header.path} is one part of a split GGUF model, which is not supported; merge the parts with"
            " `llama-gguf-split --merge` first."
        )
    if metadata.of("expert_count", 0):
        raise ModelSourceError(f"{header.path} is a mixture of experts, which is not supported.")
    hidden_size, num_heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", hidden_size // max(num_heads, 1))
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise ModelSourceError(f"{header.path} has value heads of another size than key heads.")
    if metadata.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelSourceError(f"{header.path} rotates only a part of each head, which is not supported.")
    if "token_embd.weight" not in header.tensors:
        raise ModelSourceError(f"{header.path} has no token_embd.weight; it is not a whole language model.")
    settings = settings_from_gguf(header)
    return ModelSpec(
        family=family.name,
        vocab_size=header.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=metadata.integer("feed_forward_length"),
        num_layers=metadata.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_model_len=metadata.integer("context_length"),
        rope=_rope(metadata, head_dim),
        rms_norm_eps=float(metadata.of("attention.layer_norm_rms_epsilon", 1e-5)),
        has_qkv_bias="blk.0.attn_q.bias" in header.tensors,
        has_output_bias="blk.0.attn_output.bias" in header.tensors,
        has_mlp_bias="blk.0.ffn_up.bias" in header.tensors,
        has_qk_norm=family.has_qk_norm,
        is_tied="output.weight" not in header.tensors,
        bos_token_id=settings.bos_token_id,
        eos_token_ids=settings.eos_token_ids,
        chat_template=settings.chat_template,
        name=name,
        sliding_window=_sliding_window(metadata, family),
    )


class _Metadata:
    """Metadata by the names of one architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        architecture = header.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelSourceError(f"{header.path} does not name its general.architecture.")
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(key, default)

    def of(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.of(key, default)
        # Some converters write one value per layer even where all layers agree.
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelSourceError(
                f"{self.header.path} must give {self.architecture}.{key} as one integer (found {value!r})."
            )
        return value


def _rope(metadata: _Metadata, head_dim: int) -> RopeSpec:
    theta = float(metadata.of("rope.freq_base", 10000.0))
    if ROPE_FREQS in metadata.header.tensors:
        return RopeSpec(theta, StoredDivisors(_rope_freqs(metadata.header, head_dim)))
    kind = metadata.of("rope.scaling.type", "none")
    # Files older than rope.scaling.* state the linear factor alone.
    factor = float(metadata.of("rope.scaling.factor", metadata.of("rope.scale_linear", 1.0)))
    if kind == "linear" or (kind == "none" and metadata.of("rope.scale_linear") is not None):
        return RopeSpec(theta, LinearScaling(factor))
    if kind != "none":
        raise ModelSourceError(
            f"{metadata.header.path} asks for rope scaling {kind!r}, which is not supported (none, linear and"
            " llama3 are)."
        )
    return RopeSpec(theta)


def _rope_freqs(header: GgufHeader, head_dim: int) -> tuple[float, ...]:
    tensor = header.tensors[ROPE_FREQS]
    if tensor.quant_type != _F32 or tensor.shape != (head_dim // 2,):
        raise ModelSourceError(f"{header.path} has a {ROPE_FREQS} of another type or shape than expected.")
    values = np.fromfile(header.path, dtype="<f4", count=head_dim // 2, offset=tensor.offset)
    return tuple(float(value) for value in values)


def _sliding_window(metadata: _Metadata, family: Family) -> int | None:
    window = metadata.of("attention.sliding_window")
    return int(window) if window else None
