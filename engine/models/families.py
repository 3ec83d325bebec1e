"""The table of supported architectures. Adding a family is adding one entry here. No torch.

All of them are the Llama decoder with a few switches, so one model class serves them by
configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ModelSourceError


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from the plain Llama decoder, and its names in both formats."""

    name: str  # config.json's model_type
    hf_architecture: str  # config.json's architectures[0]
    gguf_architecture: str  # general.architecture
    has_qkv_bias: bool = False  # always there, whatever attention_bias says
    obeys_attention_bias: bool = False  # config's attention_bias: bias on q, k, v and o
    obeys_mlp_bias: bool = False  # config's mlp_bias
    has_qk_norm: bool = False  # RMS norm of each head's query and key before rotation
    obeys_sliding_window: bool = False  # config's sliding_window applies without a further switch
    is_gguf_permuted: bool = False  # GGUF holds q and k rows in interleaved rotary order


FAMILIES: tuple[Family, ...] = (
    Family(
        "llama",
        "LlamaForCausalLM",
        "llama",
        obeys_attention_bias=True,
        obeys_mlp_bias=True,
        is_gguf_permuted=True,
    ),
    # llama.cpp converts Mistral as "llama"; a GGUF of Mistral therefore loads as the entry above.
    Family("mistral", "MistralForCausalLM", "llama", obeys_sliding_window=True, is_gguf_permuted=True),
    Family("qwen2", "Qwen2ForCausalLM", "qwen2", has_qkv_bias=True),
    Family("qwen3", "Qwen3ForCausalLM", "qwen3", obeys_attention_bias=True, has_qk_norm=True),
)


def family_of_hf(architecture: str) -> Family:
    """The family of a config.json architecture; raises `ModelSourceError` for an unknown one."""
    for family in FAMILIES:
        if family.hf_architecture == architecture:
            return family
    known = ", ".join(family.hf_architecture for family in FAMILIES)
    raise ModelSourceError(f"The architecture {architecture!r} is not supported; choose one of {known}.")


def family_of_gguf(architecture: str) -> Family:
    """The family of a GGUF architecture; raises `ModelSourceError` for an unknown one."""
    for family in FAMILIES:
        if family.gguf_architecture == architecture:
            return family
    known = ", ".join(dict.fromkeys(family.gguf_architecture for family in FAMILIES))
    raise ModelSourceError(f"The GGUF architecture {architecture!r} is not supported; choose one of {known}.")
