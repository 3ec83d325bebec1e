"""What labelled rows are about, apart from their wording: documents, questions, code, problems.

Rows arrive as JSON objects (`task`, `messages` or `prompt`, `tools`, `source`, `wrapper`). The
wrappers known here are taken off, so that `augment` can put others on; a row of unknown wording
gives no payload and is learned as it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class CodeTask:
    """Code with the instruction that came with it ("" for code to be continued)."""

    code: str
    instruction: str
    language: str  # of the fence


@dataclass
class Payloads:
    """Everything that can be wrapped anew. Strings, in the rows' order."""

    questions: list[tuple[str, str]] = field(default_factory=list)  # (document, question)
    documents: list[str] = field(default_factory=list)
    sentences: list[tuple[str, str]] = field(default_factory=list)  # (text, language: en zh de)
    edits: list[CodeTask] = field(default_factory=list)
    stubs: list[CodeTask] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    tool_calls: list[tuple[list[Any], str]] = field(default_factory=list)  # (tools, query)
    plain: dict[str, list[str]] = field(default_factory=dict)  # task -> free-form prompts


def row_text(row: Row) -> str:
    """The user's text, or the raw prompt."""
    if row.get("messages"):
        return str(row["messages"][-1]["content"])
    return str(row.get("prompt") or "")


def is_chinese(text: str) -> bool:
    """More than one character in ten is a Chinese one."""
    sample = text[:2000]
    return sum("\u4e00" <= c <= "\u9fff" for c in sample) > 0.1 * len(sample)


_QA = [
    re.compile(p, re.DOTALL)
    for p in (
        r"阅读下面的材料并回答问题。\n\n(?P<d>.+)\n\n问题：(?P<q>.+)",
        r"材料：\n(?P<d>.+)\n\n(?P<q>[^\n]+?)请只根据材料回答。",
        r"(?P<d>.+)\n\n根据上文，(?P<q>[^\n]+)",
        r"(?P<d>.+)\n\nQuestion: (?P<q>[^\n]+)\nAnswer:",
        r"Answer the question using only the passage below\.\n\n(?P<d>.+)\n\n(?P<q>[^\n]+)",
        r"Context:\n(?P<d>.+)\n\nBased on the context above: (?P<q>[^\n]+)",
        r"Given the following passage\n\n\"(?P<d>.+)\",\n\nanswer the following.+\n"
        r"\nQuestion: (?P<q>[^\n]+)",
        r"Extract the answer to the question from the following context\.\nQuestion: (?P<q>[^\n]+)"
        r"\nContext: (?P<d>.+)",
        r"Question: \"(?P<q>[^\n]+)\"\n\nContext: \"(?P<d>.+)\"\n\nAnswer:",
        r"Given the following context:\n\n(?P<d>.+)\n\nanswer the following question:\n\n(?P<q>[^\n]+)",
        r"Read the following paragraph and extract the answer for the question: (?P<q>[^\n]+)\n\n(?P<d>.+)",
        r"(?P<q>[^\n]+)\n\nAnswer the above question based on the context below:\n\n(?P<d>.+)",
        r"Please answer the following question about this movie plot.+?\n\nQuestion: (?P<q>[^\n]+)"
        r"\nPlot: (?P<d>.+)",
    )
]
_SUMMARY = [
    re.compile(p, re.DOTALL)
    for p in (
        r"Summarize: (?P<d>.+)",
        r"(?:Summarise the article|Condense the article down[^\n]+):\n\n(?P<d>.+)",
        r"(?:In 2 or 3 sentences|Can you write an outline|Could you please generate)[^\n]+\n"
        r"\nArticle: (?P<d>.+)",
        r"Sum the following article in brief: (?P<d>.+)",
        r"(?:Summarize the following meeting transcript\.|"
        r"Please write a short summary of this conversation:)\n\n(?P<d>.+)",
        r"(?P<d>.+)\n\nTL;DR:",
        r"(?:请总结下面这段会议记录的主要内容：\n|帮我写一份会议纪要摘要：)\n(?P<d>.+)",
        r"(?P<d>.+)\n\n用一段话概括以上内容。",
        r"(?P<d>.+)\n\nSummarize [^\n]+",
    )
]
_TRANSLATE = [
    re.compile(p, re.DOTALL)
    for p in (
        r"Translate [A-Za-z]+ to [A-Za-z]+: (?P<d>.+)",
        r"Translate the following text from [A-Za-z]+ to [A-Za-z]+:\n\n(?P<d>.+)",
        r"(?P<d>.+)\n\nTranslate to [A-Za-z]+\.",
        r"请把下面这段话翻译成..：\n(?P<d>.+)",
        r"翻译成..：(?P<d>.+)",
    )
]
_EDIT = [
    re.compile(p, re.DOTALL)
    for p in (
        r"Here is my code:\n```(?P<l>[a-z+#]*)\n(?P<c>.+)\n```\n(?P<i>[^`]+)",
        r"这是我的代码：\n```(?P<l>[a-z+#]*)\n(?P<c>.+)\n```\n需求：(?P<i>[^`]+)\n请给出完整的修改后代码。",
        r"请修改下面的代码：(?P<i>[^`]+?)\n\n```(?P<l>[a-z+#]*)\n(?P<c>.+)\n```",
        r"Edit the code below\. (?P<i>.+?)\nReturn the full updated code\.\n\n(?P<l>)(?P<c>.+)",
        r"(?P<i>[^`\n][^\n]*)\n\n```(?P<l>[a-z+#]*)\n(?P<c>.+)\n```",
    )
]
_STUB = [
    re.compile(p, re.DOTALL)
    for p in (
        r"Complete the following (?P<l>\S+) function:\n\n```\S*\n(?P<c>.+?)\n?```",
        r"补全下面的函数：\n```(?P<l>\S*)\n(?P<c>.+?)\n?```",
        r"Write the body of this (?P<l>\S+) function\.\n\n(?P<c>.+)",
    )
]
_REASON_TAILS = re.compile(r"\n(?:Let's think step by step\.|请写出解题过程。)$")


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> re.Match[str] | None:
    return next((m for p in patterns if (m := p.fullmatch(text))), None)


def collect(rows: Sequence[Row]) -> Payloads:
    """The payloads of all rows whose wording is known, and the free-form prompts by task."""
    found = Payloads()
    for row in rows:
        _collect_one(found, row)
    return found


def _collect_one(found: Payloads, row: Row) -> None:
    task, text = row["task"], row_text(row)
    if task == "document_qa":
        if match := _first(_QA, text):
            found.questions.append((match["d"].strip(), match["q"].strip()))
        elif row["source"] == "spec_bench_rag" and "\n" in text:
            document, _, question = text.rpartition("\n")
            found.questions.append((document.strip(), question.strip()))
    elif task == "summarization":
        if match := _first(_SUMMARY, text):
            found.documents.append(match["d"].strip())
    elif task == "translation":
        if match := _first(_TRANSLATE, text):
            body = match["d"].strip()
            german = (
                len(re.findall(r"\b(?:der|die|das|und|nicht|ein|ist|auf|mit|zu)\b", body)) > len(body) / 60
            )
            found.sentences.append((body, "zh" if is_chinese(body) else "de" if german else "en"))
        else:
            found.plain.setdefault(task, []).append(text)
    elif task == "code_edit":
        if match := _first(_EDIT, text):
            found.edits.append(CodeTask(match["c"], match["i"].strip(), match["l"]))
    elif task == "code_completion":
        if match := _first(_STUB, text):
            found.stubs.append(CodeTask(match["c"], "", match["l"]))
        elif not row.get("messages"):
            found.stubs.append(CodeTask(text, "", "python"))
        else:
            found.plain.setdefault(task, []).append(text)
    elif task == "reasoning":
        found.problems.append(_REASON_TAILS.sub("", text))
    elif task == "tool_call":
        if tools := row.get("tools"):
            found.tool_calls.append((list(tools), text))
        elif len(row["messages"]) == 2:
            found.tool_calls.append((_tools_in(str(row["messages"][0]["content"])), text))
    else:
        found.plain.setdefault(task, []).append(text)


def _tools_in(system: str) -> list[Any]:
    """The tool descriptions written into a system prompt, one JSON object a line."""
    tools: list[Any] = []
    for line in system.splitlines():
        if line.startswith("{"):
            try:
                tools.append(json.loads(line))
            except ValueError:
                continue
    return tools
