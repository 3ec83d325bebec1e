"""Rebuilds a tokenizer from GGUF metadata. No torch.

Two kinds of vocabulary: "gpt2" (byte-level BPE with merges; `tokenizer.ggml.pre` names how text
is split first) and "llama" (SentencePiece BPE with scores). The splitting patterns are those of
the models' own tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.errors import ModelSourceError
from engine.models.gguf_file import GgufHeader
from engine.models.tokenizer_settings import settings_from_gguf

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type; unknown 2, unused 5, byte 6
_SPACE = "\u2581"  # SentencePiece's visible space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_NUMBERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS_AND_NUMBERS}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS_AND_NUMBERS}|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How text is cut before merging: each pattern cuts the pieces the one before left."""

    patterns: tuple[str, ...]
    has_single_digits: bool = False  # each digit stands alone, before any pattern
    is_nfc: bool = False  # text is first brought into Unicode's composed form
    prefers_whole_tokens: bool = False  # a piece that is a token itself is taken without merging


_DIGITS = _Splitting((_GPT2,), has_single_digits=True)
_PLAIN = _Splitting((_GPT2,))
_SPLITTINGS = {
    # What llama.cpp does where a file names no kind, or "default".
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "gpt-2": _PLAIN,
    "olmo": _PLAIN,
    "llama3": _Splitting((_LLAMA3,), prefers_whole_tokens=True),
    "llama-v3": _Splitting((_LLAMA3,), prefers_whole_tokens=True),
    "llama-bpe": _Splitting((_LLAMA3,), prefers_whole_tokens=True),
    "qwen2": _Splitting((_QWEN2,), is_nfc=True),
    "deepseek-r1-qwen": _Splitting((_QWEN2,), is_nfc=True),
    "tekken": _Splitting((_TEKKEN,), prefers_whole_tokens=True),
}


def tokenizer_from_gguf(header: GgufHeader) -> Tokenizer:
    """Rebuild the tokenizer; raises `ModelSourceError` for a vocabulary of another kind."""
    metadata = header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelSourceError(f"{header.path} holds no tokenizer; use a GGUF file that does.")
    if len(set(tokens)) != len(tokens):
        raise ModelSourceError(f"{header.path} lists a token twice in its vocabulary; convert it again.")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(header, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(header, tokens)
    else:
        raise ModelSourceError(
            f"{header.path} has a tokenizer of kind {kind!r}, which cannot be rebuilt (gpt2 and llama can);"
            " use the model's safetensors folder with its tokenizer.json."
        )
    _add_special_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type"))
    _add_ends(tokenizer, header)
    return tokenizer


def _byte_level(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    metadata = header.metadata
    name = metadata.get("tokenizer.ggml.pre", "default")
    splitting = _SPLITTINGS.get(name)
    if splitting is None:
        raise ModelSourceError(
            f"{header.path} splits text the {name!r} way, which is not supported"
            f" ({', '.join(_SPLITTINGS)} are); use the model's safetensors folder with its tokenizer.json."
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    if not merges or not all(_is_merge(merge, vocabulary) for merge in merges):
        raise ModelSourceError(f"{header.path} has missing or broken merges; convert it again.")
    model = BPE(vocabulary, merges, ignore_merges=splitting.prefers_whole_tokens)
    tokenizer = Tokenizer(model)
    if splitting.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.has_single_digits else []
    splits += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _is_merge(merge: tuple[str, ...], vocabulary: dict[str, int]) -> bool:
    return len(merge) == 2 and {*merge, "".join(merge)} <= vocabulary.keys()


def _sentencepiece(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    metadata = header.metadata
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores") or [-float(index) for index in range(len(tokens))]
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not len(scores) == len(types) == len(tokens) > unknown:
        raise ModelSourceError(f"{header.path} has token lists of different lengths; convert it again.")
    merges = _merges_from_scores(
        vocabulary, {token: scores[index] for token, index in vocabulary.items() if types[index] == _NORMAL}
    )
    model = BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if has_prefix else undo)
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way a piece is made of two others, best-scored pieces first.

    SentencePiece joins the adjacent pair whose union scores highest, which is BPE with merges in
    this order.
    """
    ranked = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int] | None) -> None:
    """Tell the tokenizer which of its tokens are matched in text before anything else."""
    if types is None:
        return
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)


def _add_ends(tokenizer: Tokenizer, header: GgufHeader) -> None:
    settings = settings_from_gguf(header)
    bos = settings.bos_token if settings.add_bos else None
    eos = settings.eos_token if header.metadata.get("tokenizer.ggml.add_eos_token") else None
    add_ends(tokenizer, bos, eos)


def add_ends(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode(..., add_special_tokens=True)` put these tokens around a text."""
    ends = [token for token in dict.fromkeys((bos, eos)) if token is not None]
    if not ends:
        return

    def template(sequence: str) -> list[str]:
        return [piece for piece in (bos, sequence, eos) if piece is not None]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=template("$A"),
        pair=[*template("$A"), *template("$B:1")],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ends],
    )
