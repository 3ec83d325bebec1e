"""What a draft head learns from: a target's own texts and its hidden states over them, on disk.

A corpus is a folder of shards, each one safetensors file, written whole or not at all; so a
collection that was stopped anywhere goes on from the shards that are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_PATTERN = "shard-*.safetensors"


class CorpusError(Exception):
    """A corpus cannot be read or does not fit; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt to be answered. Prompts of one `group` never stand on both sides of the split.

    With a `text_ids` it is not answered: the target reads the given text, which costs it a tenth.
    """

    id: str
    token_ids: tuple[int, ...]
    group: str
    label: str = ""  # the task, for figures by task
    text_ids: tuple[int, ...] | None = None  # the whole text, prompt included


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with one answer of the target.

    `hidden` [len(token_ids) - first, hidden] holds the target's last hidden states (after its
    final norm) of the tokens from position `first` on.
    """

    id: str
    group: str
    label: str
    temperature: float | None  # None: not the target's own text
    prompt_length: int
    first: int
    token_ids: torch.Tensor  # [num_tokens] int64
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Entry:
    """One sample's line in a shard's header."""

    id: str
    group: str
    label: str
    temperature: float | None
    prompt_length: int
    first: int
    num_tokens: int


def is_validation(group: str, share: float) -> bool:
    """True for about `share` of the groups, always the same ones."""
    number = int.from_bytes(sha256(group.encode()).digest()[:8], "big")
    return number < share * 2.0**64


def write_shard(folder: Path, samples: Sequence[Sample]) -> Path:
    """Add a shard. It appears under its name only when it is complete."""
    entries = [
        _Entry(s.id, s.group, s.label, s.temperature, s.prompt_length, s.first, len(s.token_ids))
        for s in samples
    ]
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.stem.split("-")[1]) for path in folder.glob(_PATTERN)]
    path = folder / f"shard-{max(numbers, default=-1) + 1:05d}.safetensors"
    tensors = {
        "token_ids": torch.cat([s.token_ids for s in samples]).to(torch.int32),
        "hidden": torch.cat([s.hidden for s in samples]).to(torch.float16),
    }
    unfinished = path.with_suffix(".tmp")
    save_file(tensors, unfinished, {"samples": json.dumps([asdict(entry) for entry in entries])})
    unfinished.replace(path)
    return path


def collected_ids(folder: Path) -> set[str]:
    """The samples that are there already."""
    return {entry.id for path in _shards(folder) for entry in _entries(path)}


def read_corpus(folder: Path) -> Iterator[Sample]:
    """All samples, shard by shard. Raises CorpusError for a file that is none of ours."""
    for path in _shards(folder):
        entries = _entries(path)
        with safe_open(path, framework="pt") as file:
            token_ids, hidden = file.get_tensor("token_ids").to(torch.int64), file.get_tensor("hidden")
        at_token = at_row = 0
        for entry in entries:
            num_rows = entry.num_tokens - entry.first
            yield Sample(
                entry.id,
                entry.group,
                entry.label,
                entry.temperature,
                entry.prompt_length,
                entry.first,
                token_ids[at_token : at_token + entry.num_tokens],
                hidden[at_row : at_row + num_rows],
            )
            at_token += entry.num_tokens
            at_row += num_rows


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob(_PATTERN))


def _entries(path: Path) -> list[_Entry]:
    try:
        with safe_open(path, framework="pt") as file:
            return [_Entry(**fields) for fields in json.loads(file.metadata()["samples"])]
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CorpusError(
            f"{path} is no shard of a corpus ({error}); delete it and collect again."
        ) from error
