"""From a source to a model: the one place that knows which reader serves which format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.errors import ModelSourceError
from engine.models.gguf_file import read_header
from engine.models.interface import LanguageModel
from engine.models.llama import Progress, build_model
from engine.models.quantised import build_quantised
from engine.models.source import resolve
from engine.models.spec import load_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = "int8"
"""Not a torch dtype: 4- and 8-bit weights with 8-bit activations."""


def load_model(
    source: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress | None = None,
    max_model_len: int | None = None,
) -> LanguageModel:
    """Load the model behind `source` (a folder, a GGUF file or package:NAME).

    `dtype` is auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16, float16 or
    int8 (CPU only: quantised weights and products, see `engine.models.quantised`);
    `progress` is told a stage and the fraction of it done; `max_model_len` (tokens) lowers the
    model's context. Raises `ModelSourceError` with one sentence saying what to do.
    """
    place = resolve_device(device)
    build = _builder(dtype, place)
    files = resolve(source)
    spec = load_spec(files, max_model_len)
    if files.kind == "gguf":
        # Imported late: reading the header needs no `gguf`, dequantising does.
        from engine.models.gguf_weights import GgufWeights

        weights = GgufWeights(read_header(files.weights[0]), spec)
        return build(spec, weights, progress=progress)
    from engine.models.safetensors_weights import SafetensorsWeights

    with SafetensorsWeights(files.weights) as shards:
        return build(spec, shards, progress=progress)


def _builder(dtype: str, device: torch.device) -> Callable[..., LanguageModel]:
    if dtype != QUANTISED:
        return partial(build_model, device=device, dtype=resolve_dtype(dtype, device))
    if device.type != "cpu":
        raise ModelSourceError(f"The dtype {QUANTISED} is for the device cpu; use bfloat16 on {device}.")
    return build_quantised


def resolve_device(device: str | torch.device) -> torch.device:
    """The torch device by name; raises `ModelSourceError` where it does not exist here."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelSourceError(f"The device {str(device)!r} is unknown; use cpu, cuda or cuda:N.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelSourceError("The device cuda was asked for, but torch finds no CUDA GPU; use device cpu.")
    return place


def dtype_name(dtype: str, device: torch.device) -> str:
    """What a configured dtype means on `device`, by name: never auto."""
    return dtype if dtype == QUANTISED else str(resolve_dtype(dtype, device)).removeprefix("torch.")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype by name; raises `ModelSourceError` for an unknown one."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        known = ", ".join(("auto", *DTYPES))
        raise ModelSourceError(f"The dtype {dtype!r} is unknown; use {known} or {QUANTISED}.")
    return DTYPES[dtype]
