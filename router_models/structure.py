"""The shape of a request, whatever its words: named numbers of order one.

Reads about 1,000 characters (both ends and the middle) plus a few counts over the whole
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

_END, _MIDDLE = 320, 400
_LENGTHS = (60, 150, 400, 1000, 3000, 10_000)
_LABELS = frozenset(("question", "context", "passage", "article", "text", "document", "answer", "q", "a"))
_LABELS |= frozenset(("input", "output", "问题", "材料", "答案", "文章", "原文", "文本"))
_NUMBERED = re.compile(r"(?:\d+[.)、]|\[\d+\])\s")
_FORMULA = re.compile(r"\d\s*[-+*/×÷=^]\s*\d|[xyz]\s*[=+^]|\d\s*%|[$€£¥]\s*\d")
_WH = re.compile(
    r"(?:what|who|whom|whose|which|when|where|why|how|is|are|was|were|do|does|did|can|could|should|would)\b",
    re.IGNORECASE,
)

SHARES = ("letters", "digits", "cjk", "other alphabets", "code marks")


def _kinds() -> NDArray[np.uint8]:
    """Code point -> place in SHARES, or 5 for anything else. Letters beyond ASCII are other alphabets."""
    table = char_classes(np.arange(0x10000, dtype=np.uint32))
    kinds = np.choose(table, [5, 0, 1, 2, 5]).astype(np.uint8)
    kinds[0xC0:0x2000][kinds[0xC0:0x2000] == 0] = 3
    kinds[[ord(c) for c in "{}()[];=<>_|&*#/+"] + [0x5C]] = 4
    kinds.setflags(write=False)
    return kinds


_KIND = _kinds()
_WEIGHTS = (1.0, 5.0, 1.0, 5.0, 5.0)  # what is rare counts more


def _shares(kinds: bytes) -> list[float]:
    """Share of each of SHARES in a stretch of text, one byte a character."""
    n = len(kinds) or 1
    return [kinds.count(kind) / n for kind in range(5)]


def opening(text: str, limit: int = 140) -> tuple[int, int]:
    """Where the opening line lies: up to the first line break after 12 characters."""
    start = len(text) - len(text.lstrip())
    stop = text.find("\n", start + 12, start + limit)
    return start, stop if stop >= 0 else min(len(text), start + limit)


def closing(text: str, limit: int = 140) -> tuple[int, int]:
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
    first, last = opening(text), closing(text)
    begin, finish = text[slice(*first)], text[slice(*last)]
    found: dict[str, float] = {}
    _lengths(found, text, begin, finish)
    _scripts(found, (head, middle, tail), len(begin), len(finish))
    _layout(found, text, head, tail)
    _ending(found, text, begin, finish)
    _request(found, x)
    asked = asked_tokens(begin if begin == finish else f"{begin}\n{finish}")
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


def _scripts(found: dict[str, float], parts: tuple[str, str, str], begin: int, finish: int) -> None:
    """Scripts by part. `begin` and `finish` are the lengths of the first and the last line."""
    head, middle, tail = parts
    kinds = _KIND.take(code_points(head + middle + tail), mode="clip").tobytes()
    in_head, in_tail = kinds[: len(head)], kinds[len(head) + len(middle) :]
    shares = [_shares(in_head), _shares(kinds[len(head) : len(head) + len(middle)]), _shares(in_tail)]
    body = shares[1] if middle else shares[0]
    stop = len(tail.rstrip())
    first, last = _shares(in_head[:begin]), _shares(in_tail[max(0, stop - finish) : stop])
    for i, kind in enumerate(SHARES):
        for place, values in zip(("head", "middle", "tail"), shares, strict=True):
            found[f"{kind} in {place}"] = min(_WEIGHTS[i] * values[i], 2.0)
    for i in (2, 3):  # a change of script or alphabet: translation
        found[f"{SHARES[i]}: opening differs"] = min(3 * abs(first[i] - body[i]), 1.5)
        found[f"{SHARES[i]}: closing differs"] = min(3 * abs(last[i] - body[i]), 1.5)
        found[f"{SHARES[i]}: opening against closing"] = min(3 * abs(first[i] - last[i]), 1.5)
    found["code marks: opening differs"] = max(-1.0, min(10 * (first[4] - body[4]), 1.0))
    found["code marks: closing differs"] = max(-1.0, min(10 * (last[4] - body[4]), 1.0))


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
    num_speakers, num_labels, num_listed = _line_starts(both)
    found["speaker lines"] = num_speakers / (lines + 1)
    found["labels"] = min(num_labels / 2, 2.0)
    found["listed lines"] = num_listed / (lines + 1)
    found["formulas"] = min(len(_FORMULA.findall(head)) / 3, 2.0)
    found["diff"] = float("\n@@ " in text or "\n+++ " in text)
    found["paragraphs"] = math.log1p(both.count("\n\n")) / 3
    found["quotes"] = min(sum(map(both.count, '"“”「」«»')) / 6, 1.5)
    found["sentences"] = math.log1p(sum(map(both.count, (". ", "! ", "? ", ".\n", "。", "！", "？")))) / 3
    found["questions"] = min((both.count("?") + both.count("？")) / 3, 2.0)
    found["xml tags"] = min(both.count("</") / 2, 1.5)
    grams = [both[i : i + 8] for i in range(0, len(both) - 8, 8)]
    found["repeats itself"] = 1 - len(set(grams)) / len(grams) if grams else 0.0


def _line_starts(text: str) -> tuple[int, int, int]:
    """Lines that begin with "somebody:", with a known label ("Question:"), with a bullet or number."""
    num_speakers = num_labels = num_listed = 0
    for line in text.split("\n"):
        start = line[:30].lstrip()
        if start[:1] in ("-", "*", "•"):
            num_listed += start[1:2] == " "
        elif start[:1].isdigit() or start[:1] == "[":
            num_listed += _NUMBERED.match(start) is not None
        at = start.find(":")
        at = start.find("：") if at < 0 else at
        if at > 0:
            num_speakers += 1
            num_labels += start[:at].rstrip(" 0123456789").lower() in _LABELS
    return num_speakers, num_labels, num_listed


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
    found["tools"] = 4.0 * float(x.num_tools > 0)
    found["response format"] = float(x.has_response_format)
    found["system prompt"] = float(bool(x.system))
    found["log system length"] = math.log1p(len(x.system)) / 8
    found["schema in system"] = 3.0 * float('"parameters"' in x.system or '"type"' in x.system)
    found["code in system"] = float("```" in x.system)
    found["earlier turns"] = min(len(x.history) / 4, 1.0)
    found["code in earlier turns"] = float(bool(x.history) and "```" in x.history[-1])
