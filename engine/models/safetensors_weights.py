"""Weights from safetensors files, single or sharded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelSourceError

_CARRIES_NOTHING = "rotary_emb.inv_freq"  # a buffer old checkpoints saved; the config implies it


class SafetensorsWeights:
    """Memory-mapped shards; use as a context manager. Only floating tensors are read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> SafetensorsWeights:
        for path in self._paths:
            try:
                file = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise ModelSourceError(
                    f"{path} is not a complete safetensors file ({error}); download the model again."
                ) from error
            self._file_of.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file_of.clear()
        self._stack.close()

    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(name for name in self._file_of if not name.endswith(_CARRIES_NOTHING))

    def load(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise ModelSourceError(
                f"The tensor {name} is stored as {tensor.dtype}, a quantised form that is not supported; use"
                " the unquantised safetensors or a GGUF file of the model."
            )
        return tensor
