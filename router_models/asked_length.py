"""The length a prompt asks for, in tokens: "in 50 words", "three bullet points", "200字", "一句话".

Only the ends of a text are searched: instructions stand there, documents in between.
"""

from __future__ import annotations

import re

_ENDS_CHARS = 600
_TOKENS_PER = {
    "word": 1.35,
    "sentence": 26.0,
    "line": 14.0,
    "bullet": 28.0,
    "paragraph": 110.0,
    "page": 650.0,
    "character": 0.65,
    "token": 1.0,
}
"""Typical tokens per unit; the length model learns how far answers keep to them."""

_ONE_TO_TEN = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {
    **{w: i + 1 for i, w in enumerate(_ONE_TO_TEN)},
    **{
        w: i + 1
        for i, w in enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])
    },
    **{w: i + 1 for i, w in enumerate("一二三四五六七八九十")},
    "a": 1,
    "an": 1,
    "single": 1,
    "couple": 2,
    "several": 4,
    "few": 3,
    "dozen": 12,
    "两": 2,
    "几": 3,
    "百": 100,
    "千": 1000,
}
_UNITS_ZH = {
    "字": "character",
    "词": "word",
    "句": "sentence",
    "行": "line",
    "条": "bullet",
    "点": "bullet",
    "段": "paragraph",
    "页": "page",
}

_COUNT_EN = (
    r"(\d[\d,]*|one|two|three|four|five|six|seven|eight|nine|ten|a single|a couple of|a few|several|a dozen)"
)
_EN = re.compile(
    rf"\b{_COUNT_EN}(?:\s*(?:-|–|to|or)\s*(\d[\d,]*|two|three|four|five|six))?[\s-]+"
    r"(?:or (?:less|fewer|more) |short |brief |long |key |main |bullet |full )*"
    r"(words?|sentences?|lines?|bullets?|points?|paragraphs?|pages?|characters?|tokens?)\b"
)
_ZH = re.compile(
    r"(\d[\d,]*|[一二三四五六七八九十两几]+)\s*(?:[-~到至—]\s*(\d[\d,]*|[二三四五六七八九十]))?\s*"
    r"([百千]?)\s*(?:个|多|余)?\s*(字|词|句|行|条|点|段|页)(?!典|符串|母|体|[\d])"
)
_UNIT_WORDS = ("word", "sentence", "line", "bullet", "point", "paragraph", "page", "character", "token")
_SHORT_WORDS: tuple[str, ...] = (
    "briefly",
    "in brief",
    "concise",
    "tl;dr",
    "tldr",
    "in short",
    "short answer",
)
_SHORT_WORDS += ("简短", "简要", "简洁", "简单说", "简单介绍", "简单概括", "简单回答", "一两句")
_SHORT_TOKENS = 55.0
_MIN_TOKENS, _MAX_TOKENS = 1.0, 40_000.0


def _number(text: str) -> float | None:
    text = text.lower().replace(",", "").strip()
    for article in ("a ", " of"):
        text = text.replace(article, "") if len(text) > 2 else text
    if text.isdigit():
        return float(text)
    if text in _NUMBERS:
        return float(_NUMBERS[text])
    if len(text) == 2 and text[0] in "二三四五六七八九" and text[1] == "十":
        return 10.0 * _NUMBERS[text[0]]
    return None


def _unit_en(word: str) -> str:
    unit = word.lower().removesuffix("s")
    return "bullet" if unit == "point" else unit


def asked_tokens(text: str) -> float | None:
    """Tokens that `text` asks for; the last request wins. None: it asks for no length."""
    if len(text) > 2 * _ENDS_CHARS:
        text = text[:_ENDS_CHARS] + "\n" + text[-_ENDS_CHARS:]
    found: list[tuple[int, float]] = []
    lowered = text.lower()
    for match in _EN.finditer(lowered) if any(map(lowered.__contains__, _UNIT_WORDS)) else ():
        low, high = _number(match[1]), _number(match[2]) if match[2] else None
        if low is not None:
            mean = (low + high) / 2 if high is not None else low
            found.append((match.start(), mean * _TOKENS_PER[_unit_en(match[3])]))
    for match in _ZH.finditer(text) if not text.isascii() else ():
        low, high = _number(match[1]), _number(match[2]) if match[2] else None
        if low is not None:
            mean = (low + high) / 2 if high is not None else low
            scale = float(_NUMBERS.get(match[3], 1))
            found.append((match.start(), mean * scale * _TOKENS_PER[_UNITS_ZH[match[4]]]))
    if not found:
        is_short = any(map(lowered.__contains__, _SHORT_WORDS))
        return _SHORT_TOKENS if is_short else None
    # A total in words outranks a count of parts ("five points of 100 words": not multiplied out).
    return max(_MIN_TOKENS, min(max(found)[1], _MAX_TOKENS))
