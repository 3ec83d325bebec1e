"""`ModelSpec` from a folder in the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import ModelSourceError
from engine.models.families import Family, family_of_hf
from engine.models.rope import LinearScaling, Llama3Scaling, RopeSpec
from engine.models.source import ModelFiles
from engine.models.spec import ModelSpec
from engine.models.tokenizer_settings import TokenizerSettings, load_tokenizer_settings, read_json


class _Config:
    """config.json with typed access; null counts as absent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelSourceError(f"{self.path} must give {name!r} as an integer (found {value!r}).")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelSourceError(f"{self.path} must give {name!r} as a number (found {value!r}).")
        return float(value)


def spec_from_folder(files: ModelFiles) -> ModelSpec:
    """Read config.json, generation_config.json and the chat template."""
    config = _Config(files.folder / "config.json")
    family = family_of_hf(_architecture(config))
    _refuse_unsupported(config)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", hidden_size // max(num_heads, 1))
    has_attention_bias = family.obeys_attention_bias and bool(config.get("attention_bias", False))
    settings = load_tokenizer_settings(files)
    return ModelSpec(
        family=family.name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_model_len=config.integer("max_position_embeddings"),
        rope=_rope(config),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        has_qkv_bias=family.has_qkv_bias or has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=family.obeys_mlp_bias and bool(config.get("mlp_bias", False)),
        has_qk_norm=family.has_qk_norm,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=_bos(config, settings),
        eos_token_ids=_eos(config, files.folder / "generation_config.json") | settings.eos_token_ids,
        chat_template=settings.chat_template,
        name=files.name,
        sliding_window=_sliding_window(config, family),
    )


def _architecture(config: _Config) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelSourceError(f"{config.path} must name one model class under 'architectures'.")
    return names[0]


def _refuse_unsupported(config: _Config) -> None:
    if config.get("quantization_config") is not None:
        quantisation = config.get("quantization_config")
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise ModelSourceError(
            f"{config.path} has a quantization_config ({method}), which is not supported; use the"
            " unquantised safetensors or a GGUF file of the model."
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelSourceError(f"{config.path} asks for the activation {activation!r}; only silu is known.")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelSourceError(f"{config.path} rotates only a part of each head, which is not supported.")


def _rope(config: _Config) -> RopeSpec:
    # Newer files put everything under rope_parameters, older ones under rope_theta and rope_scaling.
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise ModelSourceError(f"{config.path} must give its rope settings as an object.")
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelSourceError(f"{config.path} rotates only a part of each head, which is not supported.")
    kind = settings.get("rope_type", settings.get("type", "default"))
    try:
        theta = float(settings.get("rope_theta") or config.number("rope_theta", 10000.0))
        if kind == "default" and "mrope_section" not in settings:
            return RopeSpec(theta)
        if kind == "linear":
            return RopeSpec(theta, LinearScaling(float(settings["factor"])))
        if kind == "llama3":
            scaling = Llama3Scaling(
                factor=float(settings["factor"]),
                low_freq_factor=float(settings["low_freq_factor"]),
                high_freq_factor=float(settings["high_freq_factor"]),
                original_max_position_embeddings=int(settings["original_max_position_embeddings"]),
            )
            return RopeSpec(theta, scaling)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelSourceError(f"{config.path} has broken {kind} rope settings ({error!r}).") from error
    raise ModelSourceError(
        f"{config.path} asks for rope scaling {kind!r}, which is not supported (none, linear and llama3 are)."
    )


def _bos(config: _Config, settings: TokenizerSettings) -> int | None:
    value = config.get("bos_token_id")
    return value if isinstance(value, int) else settings.bos_token_id


def _eos(config: _Config, generation_config: Path) -> frozenset[int]:
    found = [config.get("eos_token_id"), read_json(generation_config).get("eos_token_id")]
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if any(isinstance(value, bool) or not isinstance(value, int) for value in ids):
        raise ModelSourceError(f"{config.path} must give eos_token_id as an integer or a list of them.")
    return frozenset(ids)


def _sliding_window(config: _Config, family: Family) -> int | None:
    layer_types = config.get("layer_types", [])
    is_used = (
        family.obeys_sliding_window or bool(config.get("use_sliding_window", False))
        if not layer_types
        else "sliding_attention" in layer_types
    )
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelSourceError(f"{config.path} has layers of unsupported kinds: {', '.join(unknown)}.")
    window = config.get("sliding_window")
    return config.integer("sliding_window") if is_used and window is not None else None
