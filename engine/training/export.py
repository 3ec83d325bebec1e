"""A trained draft head as a folder that `serve` loads: weights in bfloat16 and a `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.models.draft_head import ARCHITECTURE
from engine.training.head_module import DraftHeadModule


def export_head(
    module: DraftHeadModule,
    draft_token_ids: Sequence[int],
    folder: Path,
    *,
    target: str,
    context_tokens: int,
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Write `model.safetensors` and `config.json`. `figures` (of the validation) go along for the reader."""
    spec = module.spec
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous() for name, value in module.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = {
        "architectures": [ARCHITECTURE],
        "target": target,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "context_tokens": context_tokens,
        "num_input_tokens": module.num_input_tokens,
        "torch_dtype": "bfloat16",
        "validation": dict(figures or {}),
        "draft_token_ids": list(draft_token_ids),
    }
    lines = json.dumps(settings, indent=1)
    # The ids on one line: they are no reading matter.
    ids = json.dumps(list(draft_token_ids))
    lines = lines[: lines.index('"draft_token_ids"')] + f'"draft_token_ids": {ids}\n}}\n'
    (folder / "config.json").write_text(lines, encoding="utf-8")
