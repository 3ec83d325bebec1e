"""What a model is: shapes, switches and limits, the same for every file format. No torch.

`load_spec` reads it from config.json or GGUF metadata. What the engine cannot compute exactly is
refused with a sentence, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.errors import ModelSourceError
from engine.models.rope import RopeSpec
from engine.models.source import ModelFiles


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One causal LM of the Llama kind."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens of context
    rope: RopeSpec = field(default_factory=RopeSpec)
    rms_norm_eps: float = 1e-5
    has_qkv_bias: bool = False
    has_output_bias: bool = False  # on attention's output projection
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    is_tied: bool = False  # the head shares the embedding's weights
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    chat_template: str | None = None  # Jinja source
    name: str = ""
    sliding_window: int | None = None  # tokens; set only where it covers the whole context

    @property
    def num_parameters(self) -> int:
        """Weights and biases, a tied head counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.has_qk_norm else 0)
        biases = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) if self.has_qkv_bias else 0
        biases += self.hidden_size if self.has_output_bias else 0
        biases += 2 * self.intermediate_size + self.hidden_size if self.has_mlp_bias else 0
        tables = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        return self.num_layers * (attention + mlp + norms + biases) + tables + self.hidden_size


def load_spec(files: ModelFiles, max_model_len: int | None = None) -> ModelSpec:
    """The spec of the model behind `files`.

    `max_model_len` lowers the context (tokens); asking for more than the model was made for, or
    leaving it open for a model whose sliding window is shorter than its context, raises
    `ModelSourceError`, as does anything unsupported.
    """
    # Imported here because both readers need ModelSpec from this module.
    from engine.models.spec_gguf import spec_from_gguf
    from engine.models.spec_hf import spec_from_folder

    spec = spec_from_gguf(files) if files.kind == "gguf" else spec_from_folder(files)
    _check_shapes(spec)
    return _limit_context(spec, max_model_len)


def _check_shapes(spec: ModelSpec) -> None:
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        value = getattr(spec, name)
        if value <= 0:
            raise ModelSourceError(f"The model {spec.name} says {name} is {value}; it must be > 0.")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelSourceError(
            f"The model {spec.name} has {spec.num_heads} query heads, which is no multiple of its"
            f" {spec.num_kv_heads} key/value heads."
        )
    if spec.head_dim <= 0 or spec.head_dim % 2:
        raise ModelSourceError(f"The model {spec.name} has head_dim {spec.head_dim}; it must be even.")


def _limit_context(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    if max_model_len is not None:
        if max_model_len < 1:
            raise ModelSourceError(f"max_model_len is {max_model_len}; it must be at least 1 token.")
        if max_model_len > spec.max_model_len:
            raise ModelSourceError(
                f"max_model_len {max_model_len} is more than the {spec.max_model_len} tokens of context"
                f" {spec.name} was made for; lower it."
            )
        spec = replace(spec, max_model_len=max_model_len)
    if spec.sliding_window is not None and spec.sliding_window < spec.max_model_len:
        raise ModelSourceError(
            f"The model {spec.name} uses sliding-window attention of {spec.sliding_window} tokens, which is"
            f" not supported; set max_model_len to {spec.sliding_window} or less, where it has no effect."
        )
    return spec
