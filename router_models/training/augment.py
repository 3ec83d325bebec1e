"""New wordings around known payloads, so that a classifier learns the request and not the document.

The same documents turn up under several tasks (a paragraph is summarised, asked about and
translated), so their words tell nothing. All randomness comes from the seed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from router_models.request_text import from_messages, from_prompt
from router_models.training import pools_en, pools_zh
from router_models.training.payloads import CodeTask, Payloads, is_chinese
from router_models.types import RequestText

_CHOICE = re.compile(r"\(([^()]*)\)")
_OPEN, _CLOSE = "\ue000", "\ue001"  # stand for escaped brackets while choices are made


@dataclass(frozen=True)
class Sample:
    """One training example. `template` names the wording it was made from."""

    text: RequestText
    task: str
    template: str


Fill = dict[str, Callable[[], str]]


def expand(template: str, rng: random.Random) -> str:
    """Make every choice in a template. Slots stay."""
    text = re.sub(r"\\([()?+.])", lambda m: {"(": _OPEN, ")": _CLOSE}.get(m[1], m[1]), template)
    while match := _CHOICE.search(text):
        text = text[: match.start()] + rng.choice(match[1].split("|")) + text[match.end() :]
    return text.replace(_OPEN, "(").replace(_CLOSE, ")")


def fill(text: str, slots: Fill) -> str:
    """Put values into the slots; one value per slot and text, except for topics and numbers."""
    once: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name in ("topic", "n", "m"):
            return slots[name]()
        if name not in once:
            once[name] = slots[name]()
        return once[name]

    return re.sub(r"<(" + "|".join(slots) + r")>", value, text)


class Augmenter:
    """Makes samples of every task from payloads."""

    def __init__(self, payloads: Payloads, seed: int, pool_part: tuple[int, int] | None = None) -> None:
        """`pool_part` (i, n) keeps the wordings whose place modulo n is not i: for validation."""
        self._p = payloads
        self._rng = random.Random(seed)
        self._part = pool_part
        self._documents = payloads.documents + [d for d, _ in payloads.questions]
        self._makers: dict[str, Callable[[ModuleType], Sample | None]] = {
            "summarization": self._summarization,
            "document_qa": self._document_qa,
            "translation": self._translation,
            "code_edit": self._code_edit,
            "code_completion": self._code_completion,
            "reasoning": self._reasoning,
            "tool_call": self._tool_call,
            "chat": self._chat,
            "creative_writing": self._creative,
        }

    def samples(self, per_task: int, chinese_share: float = 0.5) -> Iterator[Sample]:
        """`per_task` samples of each task. Tasks without payloads give none."""
        for make in self._makers.values():
            for _ in range(per_task):
                pools = pools_zh if self._rng.random() < chinese_share else pools_en
                sample = make(pools)
                if sample is not None:
                    yield sample

    def _pick(self, pool: Sequence[str], name: str) -> tuple[str, str]:
        """An expanded template and its name."""
        places = range(len(pool))
        if self._part is not None and len(pool) > 1:
            part, parts = self._part
            places = [i for i in places if i % parts != part % parts] or list(places)  # type: ignore[assignment]
        at = self._rng.choice(list(places))
        return expand(pool[at], self._rng), f"{name}-{at}"

    def _slots(self, pools: ModuleType) -> Fill:
        rng = self._rng
        return {
            "n": lambda: str(rng.randint(2, 9)),
            "m": lambda: str(
                rng.choice([10, 12, 20, 30, 48, 50, 80, 100, 120, 150, 200, 300, 500, 800, 1000])
            ),
            "topic": lambda: rng.choice(pools.TOPICS),
            "thing": lambda: rng.choice(pools.THINGS),
            "plang": lambda: rng.choice(pools.PLANGS),
            "job": lambda: rng.choice(pools.JOBS),
            "lang": lambda: rng.choice(pools.LANGUAGES),
            "src": lambda: rng.choice(pools.LANGUAGES),
            "lang_en": lambda: rng.choice(pools_en.LANGUAGES),
        }

    def _finish(self, text: str, task: str, template: str, pools: ModuleType, system: str = "") -> Sample:
        """Everyday dress: a greeting, thanks, a generic system prompt, an earlier turn."""
        rng = self._rng
        if rng.random() < 0.06:
            text = rng.choice(pools.POLITE) + text
        if rng.random() < 0.05:
            text += rng.choice(pools.THANKS)
        if rng.random() < 0.05:
            text = text.rstrip() + "\n" * rng.randint(1, 2)
        if not system and rng.random() < 0.18:
            system = rng.choice(pools.GENERIC_SYSTEM)
        messages = [{"role": "system", "content": system}] if system else []
        chats = self._p.plain.get("chat", [])
        if chats and rng.random() < 0.04:
            messages += [
                {"role": "user", "content": rng.choice(chats)},
                {"role": "assistant", "content": "…"},
            ]
        messages.append({"role": "user", "content": text})
        has_format = rng.random() < 0.02
        return Sample(from_messages(messages, has_response_format=has_format), task, template)

    def _in_language(self, items: Sequence[str], pools: ModuleType, loyalty: float = 0.85) -> str:
        """One of `items`, mostly in the language of the wording."""
        want = pools is pools_zh
        for _ in range(8):
            item = self._rng.choice(items)
            if is_chinese(item) == want or self._rng.random() > loyalty:
                return item
        return item

    def _clip(self, text: str) -> str:
        """Sometimes a shorter piece: length alone must not tell the task."""
        if self._rng.random() < 0.25 and len(text) > 300:
            keep = self._rng.randint(120, min(len(text), 1500))
            return text[:keep].rsplit(" ", 1)[0]
        return text

    def _summarization(self, pools: ModuleType) -> Sample | None:
        if not self._documents:
            return None
        document = self._clip(self._in_language(self._documents, pools))
        if self._rng.random() < 0.06:
            system, name = self._pick(pools.SUMMARY_SYSTEM, "summary-system")
            return self._finish(document, "summarization", name, pools, fill(system, self._slots(pools)))
        template, name = self._pick(pools.SUMMARY, "summary")
        slots = self._slots(pools) | {"doc": lambda: document}
        return self._finish(fill(template, slots), "summarization", name, pools)

    def _document_qa(self, pools: ModuleType) -> Sample | None:
        pairs, rng = self._p.questions, self._rng
        if not pairs:
            return None
        want = pools is pools_zh
        for _ in range(8):
            document, question = rng.choice(pairs)
            if is_chinese(document) == want or rng.random() < 0.05:
                break
        if rng.random() < 0.3:
            document = self._in_language(self._documents, pools)
            question = rng.choice(pools.QUESTIONS)
        document = self._clip(document)
        if rng.random() < 0.12:
            system, name = self._pick(pools.QA_SYSTEM, "qa-system")
            return self._finish(question, "document_qa", name, pools, fill(system, {"doc": lambda: document}))
        template, name = self._pick(pools.QA, "qa")
        text = fill(template, self._slots(pools) | {"doc": lambda: document, "q": lambda: question})
        return self._finish(text, "document_qa", name, pools)

    def _translation(self, pools: ModuleType) -> Sample | None:
        if not self._p.sentences:
            return None
        rng = self._rng
        text, language = rng.choice(self._p.sentences)
        if rng.random() < 0.12 and self._documents:
            text = rng.choice(self._documents)[: rng.randint(80, 600)]
            language = "zh" if is_chinese(text) else "en"
        elif rng.random() < 0.12:
            source = rng.choice([pools_en, pools_zh])
            text, language = rng.choice(source.PHRASES), "zh" if source is pools_zh else "en"
        elif rng.random() < 0.15:
            text = re.split(r"(?<=[,.，。])", text)[0]
        own = {"zh": ("Chinese", "中文"), "en": ("English", "英语"), "de": ("German", "德语")}[language]
        targets = [
            t
            for t in pools.LANGUAGES
            if t not in (*own, "英文", "汉语", "德文")[: 2 if language != "en" else 3]
        ]
        slots = self._slots(pools) | {
            "text": lambda: text,
            "lang": lambda: rng.choice(targets),
            "src": lambda: own[1] if pools is pools_zh else own[0],
        }
        if rng.random() < 0.08:
            system, name = self._pick(pools.TRANSLATION_SYSTEM, "translation-system")
            return self._finish(text, "translation", name, pools, fill(system, slots))
        template, name = self._pick(pools.TRANSLATION, "translation")
        return self._finish(fill(template, slots), "translation", name, pools)

    def _fence(self, code: str, language: str) -> str:
        style = self._rng.random()
        if style < 0.65:
            return f"```{language if self._rng.random() < 0.7 else ''}\n{code.strip(chr(10))}\n```"
        if style < 0.72:
            return f"<code>\n{code}\n</code>"
        return code

    def _diff(self, code: str) -> str:
        lines = code.strip("\n").splitlines()
        at = self._rng.randrange(max(1, len(lines)))
        part = lines[at : at + 4] or [""]
        body = [
            f" {part[0]}",
            *(f"-{p}" for p in part[1:2]),
            "+    changed = True",
            *(f" {p}" for p in part[2:]),
        ]
        text = (
            f"--- a/main.py\n+++ b/main.py\n@@ -{at + 1},{len(part)} +{at + 1},{len(body)} @@\n"
            + "\n".join(body)
        )
        return f"```diff\n{text}\n```" if self._rng.random() < 0.6 else text

    def _code_edit(self, pools: ModuleType) -> Sample | None:
        rng = self._rng
        sources: list[CodeTask] = self._p.edits
        if not sources:
            return None
        source = rng.choice(sources)
        if pools is pools_zh and not is_chinese(source.instruction):
            what = source.instruction if rng.random() < 0.35 else expand(rng.choice(pools.EDITS), rng)
        else:
            what = source.instruction if rng.random() < 0.5 else expand(rng.choice(pools.EDITS), rng)
        slots = self._slots(pools)
        what = fill(what, {"plang": slots["plang"]}).rstrip(".。")
        slots |= {
            "what": lambda: what if pools is pools_zh else what[:1].upper() + what[1:],
            "code": lambda: self._fence(source.code, source.language),
            "bare": lambda: source.code,
            "diff": lambda: self._diff(source.code),
        }
        if rng.random() < 0.04:
            system, name = self._pick(pools.EDIT_SYSTEM, "edit-system")
            text = fill(rng.choice(["<what>\n<code>", "<code>\n<what>"]), slots)
            return self._finish(text, "code_edit", name, pools, system)
        template, name = self._pick(pools.EDIT, "edit")
        return self._finish(fill(template, slots), "code_edit", name, pools)

    def _cut(self, code: str) -> str:
        """The start of a file, ending where an editor's cursor may stand."""
        lines = code.strip("\n").splitlines()
        keep = self._rng.randint(max(1, len(lines) // 4), max(1, 3 * len(lines) // 4))
        text = "\n".join(lines[:keep])
        if self._rng.random() < 0.4 and len(text) > 20:
            return text[: len(text) - self._rng.randint(1, min(15, len(text) - 10))]
        return text + "\n"

    def _code_completion(self, pools: ModuleType) -> Sample | None:
        rng = self._rng
        if rng.random() < 0.38:
            template, name = self._pick(pools.NL2CODE, "nl2code")
            return self._finish(fill(template, self._slots(pools)), "code_completion", name, pools)
        if not self._p.stubs:
            return None
        stub = rng.choice(self._p.stubs)
        code = stub.code
        if self._p.edits and rng.random() < 0.3:
            code = self._cut(rng.choice(self._p.edits).code)
        if rng.random() < 0.2:
            suffix = code.splitlines()[-1] if rng.random() < 0.3 else None
            return Sample(from_prompt(code, suffix), "code_completion", "raw")
        slots = self._slots(pools) | {
            "fence": lambda: self._fence(code, stub.language),
            "bare_stub": lambda: code,
            "plang": lambda: stub.language or "python",
        }
        if rng.random() < 0.06:
            system, name = self._pick(pools.COMPLETE_SYSTEM, "complete-system")
            return self._finish(code, "code_completion", name, pools, system)
        template, name = self._pick(pools.COMPLETE, "complete")
        return self._finish(fill(template, slots), "code_completion", name, pools)

    def _reasoning(self, pools: ModuleType) -> Sample | None:
        rng = self._rng
        slots = self._slots(pools)
        if self._p.problems and rng.random() < 0.65:
            problem = self._in_language(self._p.problems, pools, 0.97)
        else:
            problem = fill(rng.choice(pools.PROBLEMS), slots)
        slots["problem"] = lambda: problem
        if rng.random() < 0.05:
            system, name = self._pick(pools.REASON_SYSTEM, "reason-system")
            return self._finish(problem, "reasoning", name, pools, system)
        template, name = self._pick(pools.REASON, "reason")
        return self._finish(fill(template, slots), "reasoning", name, pools)

    def _tool_call(self, pools: ModuleType) -> Sample | None:
        rng = self._rng
        if not self._p.tool_calls:
            return None
        tools, query = rng.choice(self._p.tool_calls)
        if rng.random() < 0.3:
            if rng.random() < 0.5:  # with tools at hand, any short request is one for them
                query = self._short_request(query)
            sample = self._finish(query, "tool_call", "tools", pools)
            text = sample.text
            return Sample(
                RequestText(text.user, text.system, text.history, num_tools=max(1, len(tools))),
                "tool_call",
                "tools",
            )
        bare = [t.get("function", t) for t in tools] if rng.random() < 0.4 else tools
        if rng.random() < 0.25:
            shown = json.dumps(bare, ensure_ascii=False, indent=rng.choice([None, 2]))
        else:
            shown = "\n".join(json.dumps(t, ensure_ascii=False) for t in bare)
        template, name = self._pick(pools.TOOLS_SYSTEM, "tools-in-system")
        system = template.replace("<tools>", shown)
        if rng.random() < 0.12:
            return self._finish(f"{system}\n\n{query}", "tool_call", name, pools)
        return self._finish(query, "tool_call", name, pools, system)

    def _short_request(self, fallback: str) -> str:
        free = [t for texts in self._p.plain.values() for t in texts] + self._p.problems
        return self._rng.choice(free)[:400] if free else fallback

    def _chat(self, pools: ModuleType) -> Sample | None:
        if self._p.tool_calls and self._rng.random() < 0.06:  # the same queries without any tool
            return self._finish(self._rng.choice(self._p.tool_calls)[1], "chat", "query", pools)
        template, name = self._pick(pools.CHAT, "chat")
        return self._finish(fill(template, self._slots(pools)), "chat", name, pools)

    def _creative(self, pools: ModuleType) -> Sample | None:
        template, name = self._pick(pools.CREATIVE, "creative")
        return self._finish(fill(template, self._slots(pools)), "creative_writing", name, pools)
