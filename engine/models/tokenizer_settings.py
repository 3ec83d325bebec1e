"""What a model's files say about text: chat template, bos and eos. No torch, no tokenizer built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelSourceError
from engine.models.gguf_file import GgufHeader, read_header
from engine.models.source import ModelFiles


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """`bos_token` and `eos_token` are the strings a chat template may use."""

    chat_template: str | None = None  # Jinja source
    bos_token: str | None = None
    eos_token: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    # Plain text (not a rendered chat template) starts with bos; None leaves it to tokenizer.json.
    add_bos: bool | None = None


def load_tokenizer_settings(files: ModelFiles) -> TokenizerSettings:
    """Read the settings beside (safetensors) or inside (GGUF) the weights."""
    if files.kind == "gguf":
        return settings_from_gguf(read_header(files.weights[0]))
    return _settings_from_folder(files.folder)


def settings_from_gguf(header: GgufHeader) -> TokenizerSettings:
    """As `load_tokenizer_settings`, for a header that was already read."""
    metadata = header.metadata
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and tokens and not 0 <= value < len(tokens):
            raise ModelSourceError(f"{header.path} names {name} token {value} of only {len(tokens)}.")
        return value

    bos, eos = token_id("bos"), token_id("eos")
    # A turn (eot) or a message (eom) may end with another token than a text.
    ends = (eos, token_id("eot"), token_id("eom"))
    return TokenizerSettings(
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=tokens[bos] if bos is not None and tokens else None,
        eos_token=tokens[eos] if eos is not None and tokens else None,
        bos_token_id=bos,
        eos_token_ids=frozenset(end for end in ends if end is not None),
        add_bos=_adds_bos(metadata) and bos is not None,
    )


def _adds_bos(metadata: dict[str, Any]) -> bool:
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    # llama.cpp's defaults where the file is silent: SentencePiece vocabularies and Llama 3.
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in (
        "llama3",
        "llama-v3",
        "llama-bpe",
    )


def _settings_from_folder(folder: Path) -> TokenizerSettings:
    config = read_json(folder / "tokenizer_config.json")
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else _template(config)
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    ids = _added_token_ids(folder / "tokenizer.json")
    stated = config.get("add_bos_token")
    return TokenizerSettings(
        chat_template=template,
        bos_token=bos,
        eos_token=eos,
        bos_token_id=ids.get(bos or ""),
        eos_token_ids=frozenset(ids[token] for token in (eos,) if token in ids),
        add_bos=None if stated is None else bool(stated),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty where there is no such file.

    Raises `ModelSourceError` if it holds anything else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} is not readable JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path} does not hold a JSON object; download it again.")
    return value


def _added_token_ids(path: Path) -> dict[str, int]:
    """Ids of the special tokens that tokenizer.json lists."""
    added = read_json(path).get("added_tokens") or []
    return {entry["content"]: entry["id"] for entry in added if {"content", "id"} <= entry.keys()}


def _template(config: dict[str, Any]) -> str | None:
    """The template; where a file holds several by name, the one named "default"."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str | None:
    """A token is written as a string or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
