"""From a source to a model: the one place that knows which reader serves which format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.errors import ModelSourceError
from engine.kernels import native
from engine.models import quantised
from engine.models.gguf_file import read_header
from engine.models.interface import LanguageModel
from engine.models.llama import Progress, build_model
from engine.models.packed_cache import MIN_FILE_BYTES, open_packed_cache
from engine.models.source import ModelFiles, resolve
from engine.models.spec import load_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = "int8"
"""Not a torch dtype: 4- and 8-bit weights with 8-bit activations."""
_FULL_TYPES = frozenset({0, 1, 28, 30})  # ggml's numbers for F32, F16, F64 and BF16


def load_model(
    source: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress | None = None,
    max_model_len: int | None = None,
) -> LanguageModel:
    """Load the model behind `source` (a folder, a GGUF file or package:NAME).

    `dtype` is float32, bfloat16, float16, int8 (CPU only: quantised weights and products, see
    `engine.models.quantised`) or auto. Auto is bfloat16 on a GPU; on the CPU it is int8 for a file
    whose weights are quantised already, where the C kernels run, and float32 otherwise.
    `progress` is told a stage and the fraction of it done; `max_model_len` (tokens) lowers the
    model's context. Raises `ModelSourceError` with one sentence saying what to do.
    """
    place = resolve_device(device)
    if dtype not in ("auto", QUANTISED):
        resolve_dtype(dtype, place)  # a wrong name is told before anything is read
    files = resolve(source)
    spec = load_spec(files, max_model_len)
    if dtype == "auto" and place.type == "cpu" and _is_quantised(files) and quantised.serves(spec):
        dtype = QUANTISED
    build = _builder(dtype, place)
    if files.kind == "gguf":
        # Imported late: reading the header needs no `gguf`, dequantising does.
        from engine.models.gguf_weights import GgufWeights

        weights = GgufWeights(read_header(files.weights[0]), spec)
        library = native.load_library() if dtype == QUANTISED else None
        if library is not None and files.weights[0].stat().st_size >= MIN_FILE_BYTES:
            cache = open_packed_cache(files.weights[0], library)
            return quantised.build_quantised(spec, weights, progress=progress, cache=cache)
        return build(spec, weights, progress=progress)
    from engine.models.safetensors_weights import SafetensorsWeights

    with SafetensorsWeights(files.weights) as shards:
        return build(spec, shards, progress=progress)


def _builder(dtype: str, device: torch.device) -> Callable[..., LanguageModel]:
    if dtype != QUANTISED:
        return partial(build_model, device=device, dtype=resolve_dtype(dtype, device))
    if device.type != "cpu":
        raise ModelSourceError(f"The dtype {QUANTISED} is for the device cpu; use bfloat16 on {device}.")
    return quantised.build_quantised


def _is_quantised(files: ModelFiles) -> bool:
    """True when the file keeps every layer's weight matrices in fewer than 16 bits a weight."""
    if files.kind != "gguf":
        return False
    tensors = read_header(files.weights[0]).tensors.values()
    matrices = [t for t in tensors if t.name.startswith("blk.") and len(t.shape) > 1]
    return bool(matrices) and all(t.quant_type not in _FULL_TYPES for t in matrices)


def resolve_device(device: str | torch.device) -> torch.device:
    """The torch device by name; raises `ModelSourceError` where it does not exist here."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelSourceError(f"The device {str(device)!r} is unknown; use cpu, cuda or cuda:N.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelSourceError("The device cuda was asked for, but torch finds no CUDA GPU; use device cpu.")
    return place


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype by name; raises `ModelSourceError` for an unknown one."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        known = ", ".join(("auto", *DTYPES))
        raise ModelSourceError(f"The dtype {dtype!r} is unknown; use {known} or {QUANTISED}.")
    return DTYPES[dtype]
