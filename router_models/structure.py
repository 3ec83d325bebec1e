"""The shape of a request, whatever its words: named numbers of order one.

Reads at most about 2,000 characters (both ends and the middle) plus a few counts over the whole
text, so the cost does not grow with the prompt.
"""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from router_models.asked_length import asked_tokens
from router_models.text import char_classes, code_points
from router_models.types import RequestText

_END, _MIDDLE = 400, 700
_CODE_MARKS = frozenset("{}()[];=<>_\\|&*#/+")
_LENGTHS = (60, 150, 400, 1000, 3000, 10_000)
_SPEAKER = re.compile(r"^[^\n:：]{1,28}[:：]", re.MULTILINE)
_LABEL = re.compile(
    r"^\s*(?:question|context|passage|article|text|document|answer|q|a|input|output|问题|材料|答案|文章|原文|文本)"
    r"\s*\d*\s*[:：]",
    re.MULTILINE | re.IGNORECASE,
)
_LISTED = re.compile(r"^\s*(?:[-*•]|\d+[.)、]|\[\d+\])\s", re.MULTILINE)
_FORMULA = re.compile(r"\d\s*[-+*/×÷=^]\s*\d|[xyz]\s*[=+^]|\d\s*%|[$€£¥]\s*\d")
_WH = re.compile(
    r"(?:what|who|whom|whose|which|when|where|why|how|is|are|was|were|do|does|did|can|could|should|would)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[.!?。！？]\s")

Shares = tuple[float, float, float, float, float]
SHARES = ("letters", "digits", "cjk", "other alphabets", "code marks")


def _shares(text: str) -> Shares:
    """Shares of letters, digits, CJK, letters beyond ASCII, and code punctuation."""
    if not text:
        return (0.0, 0.0, 0.0, 0.0, 0.0)
    points = code_points(text)
    kinds: NDArray[np.intp] = np.bincount(char_classes(points), minlength=5)
    n = len(points)
    foreign = np.count_nonzero((points >= 0xC0) & (points < 0x2000))
    marks = sum(map(text.count, _CODE_MARKS))
    return (float(kinds[1]) / n, float(kinds[2]) / n, float(kinds[3]) / n, foreign / n, marks / n)


def opening(text: str, limit: int = 160) -> tuple[int, int]:
    """Where the opening line lies: up to the first line break after 12 characters."""
    start = len(text) - len(text.lstrip())
    stop = text.find("\n", start + 12, start + limit)
    return start, stop if stop >= 0 else min(len(text), start + limit)


def closing(text: str, limit: int = 160) -> tuple[int, int]:
    """Where the closing line lies: after the last line break before the last 4 characters."""
    stop = len(text.rstrip())
    start = text.rfind("\n", max(0, stop - limit), max(0, stop - 4))
    return (start + 1 if start >= 0 else max(0, stop - limit)), stop


def structure(x: RequestText) -> dict[str, float]:
    """All shape features of a request, by name; the same names in the same order for every request."""
    text = x.user
    n = len(text)
    mid = (n - _MIDDLE) // 2
    head, tail = text[:_END], text[-_END:]
    middle = text[mid : mid + _MIDDLE] if n > 2 * _END + _MIDDLE else text[_END : _END + _MIDDLE]
    begin, finish = text[slice(*opening(text))], text[slice(*closing(text))]
    found: dict[str, float] = {}
    _lengths(found, text, begin, finish)
    shares = {name: _shares(part) for name, part in (("head", head), ("middle", middle), ("tail", tail))}
    _scripts(found, shares, _shares(begin), _shares(finish), bool(middle))
    _layout(found, text, head, tail)
    _ending(found, text, begin, finish)
    _request(found, x)
    asked = asked_tokens(text)
    found["asks for a length"] = float(asked is not None)
    found["length asked for"] = math.log1p(asked) / 8 if asked is not None else 0.0
    return found


def _lengths(found: dict[str, float], text: str, begin: str, finish: str) -> None:
    n = len(text)
    found["log length"] = math.log1p(n) / 10
    for low, high in zip((0, *_LENGTHS), (*_LENGTHS, 10**9), strict=True):
        found[f"length {low} to {high if high < 10**9 else 'any'}"] = float(low <= n < high)
    lines = text.count("\n")
    found["log lines"] = math.log1p(lines) / 6
    found["one line"] = float(lines == 0)
    found["line breaks per character"] = min(20 * lines / (n + 1), 2.0)
    found["log opening length"] = math.log1p(len(begin)) / 5
    found["log closing length"] = math.log1p(len(finish)) / 5


def _scripts(
    found: dict[str, float], shares: dict[str, Shares], begin: Shares, finish: Shares, has_middle: bool
) -> None:
    for i, kind in enumerate(SHARES):
        weight = 5.0 if kind in ("digits", "other alphabets", "code marks") else 1.0
        for part, values in shares.items():
            found[f"{kind} in {part}"] = min(weight * values[i], 2.0)
    body = shares["middle"] if has_middle else shares["head"]
    for i in (2, 3):  # a change of script or alphabet: translation
        found[f"{SHARES[i]}: opening differs"] = min(3 * abs(begin[i] - body[i]), 1.5)
        found[f"{SHARES[i]}: closing differs"] = min(3 * abs(finish[i] - body[i]), 1.5)
        found[f"{SHARES[i]}: opening against closing"] = min(3 * abs(begin[i] - finish[i]), 1.5)
    found["code marks: opening differs"] = max(-1.0, min(10 * (begin[4] - body[4]), 1.0))
    found["code marks: closing differs"] = max(-1.0, min(10 * (finish[4] - body[4]), 1.0))


def _layout(found: dict[str, float], text: str, head: str, tail: str) -> None:
    fences = text.count("```")
    found["no fence"] = float(fences == 0)
    found["one fenced block"] = float(fences == 2)
    found["several fenced blocks"] = float(fences > 2)
    found["open fence"] = float(fences % 2 == 1)
    both = head + "\n" + tail
    lines = both.count("\n")
    indented = both.count("\n    ") + both.count("\n\t") + both.count("\n  ")
    found["indented lines"] = indented / (lines + 1)
    found["speaker lines"] = min(len(_SPEAKER.findall(both)) / (lines + 1), 1.0)
    found["labels"] = min(len(_LABEL.findall(both)) / 2, 2.0)
    found["listed lines"] = min(len(_LISTED.findall(both)) / (lines + 1), 1.0)
    found["formulas"] = min(len(_FORMULA.findall(both)) / 3, 2.0)
    found["diff"] = float("\n@@ " in text or "\n+++ " in text)
    found["paragraphs"] = math.log1p(both.count("\n\n")) / 3
    found["quotes"] = min(sum(map(both.count, '"“”「」«»')) / 6, 1.5)
    found["sentences"] = math.log1p(len(_SENTENCE.findall(both))) / 3
    found["questions"] = min((both.count("?") + both.count("？")) / 3, 2.0)
    found["xml tags"] = min(both.count("</") / 2, 1.5)
    grams = [both[i : i + 12] for i in range(0, len(both) - 12, 3)]
    found["repeats itself"] = 1 - len(set(grams)) / len(grams) if grams else 0.0


def _ending(found: dict[str, float], text: str, begin: str, finish: str) -> None:
    stripped = text.rstrip()
    last = stripped[-1:]
    is_long = len(text) > 300
    asks_last, asks_first = last in ("?", "？"), "?" in begin or "？" in begin
    found["ends with a question mark"] = float(asks_last)
    found["question mark in opening"] = float(asks_first)
    found["question mark in closing"] = float("?" in finish or "？" in finish)
    found["document, then question"] = float(is_long and asks_last and len(finish) < 160)
    found["question, then document"] = float(is_long and asks_first and len(begin) < 160)
    found["opens with a question word"] = float(bool(_WH.match(begin)))
    found["closes with a question word"] = float(bool(_WH.match(finish)))
    found["ends with a colon"] = float(last in (":", "："))
    found["opening ends with a colon"] = float(begin.rstrip()[-1:] in (":", "："))
    found["ends mid-code"] = float(last in tuple("{([,=\\") or (last == ":" and "(" in finish))
    found["ends with a bracket"] = float(last in (")", "}", "]", ";"))
    found["ends with a quote"] = float(last in ('"', "'", "”", "」"))
    found["ends with a fence"] = float(stripped.endswith("```"))
    found["ends with a docstring"] = float(stripped.endswith(('"""', "'''", "*/")))
    found["ends with a full stop"] = float(last in (".", "。", "!", "！"))
    found["ends with a letter"] = float(last.isalnum())
    found["trailing line break"] = float(text.endswith("\n"))
    found["closing line indented"] = float(finish[:2] in ("  ", "\t"))


def _request(found: dict[str, float], x: RequestText) -> None:
    found["raw prompt"] = float(x.is_raw_prompt)
    found["suffix"] = float(x.suffix is not None)
    found["tools"] = 2.0 * float(x.num_tools > 0)
    found["response format"] = float(x.has_response_format)
    found["system prompt"] = float(bool(x.system))
    found["log system length"] = math.log1p(len(x.system)) / 8
    found["schema in system"] = 2.0 * float('"parameters"' in x.system or '"type"' in x.system)
    found["code in system"] = float("```" in x.system)
    found["earlier turns"] = min(len(x.history) / 4, 1.0)
    found["code in earlier turns"] = float(bool(x.history) and "```" in x.history[-1])
