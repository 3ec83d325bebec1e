"""Token ids to text, a few at a time, never splitting a character.

Almost every tokenizer of the supported families spells a token as a fixed string of bytes:

- byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2): each character of the token stands for one byte;
- SentencePiece BPE (Llama 2, Mistral): "▁" is a space, `<0xE4>` is one byte, and the space in
  front of the whole text is dropped.

Then text is those bytes read as UTF-8, and an incremental UTF-8 decoder gives the same text as
decoding all ids at once, in time linear in the bytes. Any other tokenizer is decoded through a
sliding window of its last tokens. `TokenBytes` is the table, `Detokenizer` one answer's state.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_MAX_PENDING_TOKENS = 32  # a window that still ends in a broken character after this many never heals


class TextCodec(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...

    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...

    def get_added_tokens_decoder(self) -> dict[int, Any]: ...

    def to_str(self, pretty: bool = False) -> str: ...


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token with characters outside the spelling is plain text
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.match(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _decoder_kinds(tokenizer: TextCodec) -> tuple[str, ...]:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return tuple(part.get("type", "") for part in parts)


class TokenBytes:
    """The bytes of every token, and which tokens are special (left out of text)."""

    def __init__(self, tokenizer: TextCodec) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self.strips_first_space = False
        spell = None
        if kinds == ("ByteLevel",):
            spell = _byte_level
        elif kinds in (("Replace", "ByteFallback", "Fuse", "Strip"), ("Replace", "ByteFallback", "Fuse")):
            spell = _sentencepiece
            self.strips_first_space = kinds[-1] == "Strip"
        self.is_table = spell is not None
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._bytes = [self._spell(token_id, spell) for token_id in range(tokenizer.get_vocab_size())]

    def _spell(self, token_id: int, spell: Any) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if spell is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return spell(token)  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._bytes)

    def of(self, token_id: int) -> bytes:
        """The bytes of one token; a special token's are its name. Empty for an id without a token
        (models pad their vocabulary)."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def text_of(self, token_id: int) -> str:
        """One token by itself as text, with U+FFFD for a part of a character."""
        return self.of(token_id).decode(errors="replace")

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """All ids at once, by the tokenizer itself."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


class Detokenizer(Protocol):
    """One answer's text so far."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is left: U+FFFD for bytes that never became a character, else ""."""
        ...


def new_detokenizer(table: TokenBytes) -> Detokenizer:
    """The detokenizer that fits the tokenizer. Special tokens give no text."""
    return ByteDetokenizer(table) if table.is_table else WindowDetokenizer(table)


class ByteDetokenizer:
    """Tokens are bytes: an incremental UTF-8 decoder does the rest."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = table.strips_first_space

    def push(self, token_id: int) -> str:
        if token_id in self._table.special_ids:
            return ""
        return self._strip(self._utf8.decode(self._table.of(token_id)))

    def finish(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For tokenizers whose tokens have no fixed spelling: decode a window of the last tokens.

    The window holds the tokens since the last certain character plus those of the emission
    before, so that rules that look at the left neighbour (spaces between words) apply.
    """

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._window: list[int] = []
        self._num_shown = 0  # leading tokens of the window whose text is out
        self._shown = ""  # their text

    def push(self, token_id: int) -> str:
        if token_id in self._table.special_ids:
            return ""
        self._window.append(token_id)
        text = self._table.decode(self._window)
        is_broken = text.endswith("\ufffd") and len(self._window) - self._num_shown < _MAX_PENDING_TOKENS
        if is_broken or len(text) <= len(self._shown):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._table.decode(self._window)) if self._window else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._table.decode(self._window)
        return new
