"""The first honest estimate of a request's task: a few structural rules.

Every rule that applies adds points to a task; probabilities are a softmax of the points. Only the
instruction (the last user message, or its two ends when it is long) is searched for verbs, so
that a document's own words count for little. English and Chinese.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from specgate.types import TASKS, GenerationRequest, TaskEstimate

_END_CHARS = 400  # how much of each end of a long message is taken for the instruction
_FENCE = re.compile(r"```|~~~")
_CODE_LINE = re.compile(
    r"^\s*(def |class |import |from \w+ import|return\b|if .*:$|for .*:$|while .*[:{]$|func |fn |"
    r"public |private |"
    r"#include|const |let |var |@\w+|}\s*$|\S.*[;{]\s*$)",
    re.MULTILINE,
)


def _words(english: str, chinese: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{english})\b|{chinese}", re.IGNORECASE)


_VERBS: tuple[tuple[str, float, re.Pattern[str]], ...] = (
    (
        "summarization", 4.0,
        _words(r"summar(?:y|ies|ize|ise|izing)|tl;?dr|key points|main points|minutes of|"
               r"gist|condense|recap|headline",
               r"总结|摘要|概括|概述|归纳|要点|纪要|提炼|标题"),
    ),
    (
        "translation", 5.0,
        _words(r"translat\w+|in(?:to)? (?:english|chinese|german|french|spanish|japanese|simplified chinese)",
               r"翻译|译成|译为|译文|英译|汉译|用英文表达|用英语怎么说"),
    ),
    (
        "code_edit", 4.0,
        _words(r"fix|bugs?|refactor|rewrite (?:the|this) (?:code|function)|modify|debug|"
               r"edit|rename|correct the|"
               r"add (?:a|an|type|doc)\w*|apply the (?:change|edit)|patch|updated? (?:the|"
               r"this) (?:code|file|function)",
               r"修复|修改|重构|改写(?:代码|函数)|调试|改正|有错|错误.{0,6}代码|加上|重命名|改成"),
    ),
    (
        "code_completion", 3.0,
        _words(r"complete the (?:function|code|method|body)|implement|write (?:a|an|the) (?:\w+ ){0,3}"
               r"(?:function|program|script|class|method|query|regex)|function body|continue the code",
               r"补全|实现.{0,12}(?:函数|方法|功能|代码)|写.{0,8}(?:函数|程序|脚本|代码)|"
               r"编写.{0,10}(?:函数|程序|代码)|续写代码"),
    ),
    (
        "document_qa", 3.5,
        _words(r"according to|based on the|given the (?:passage|text|context|document)|"
               r"in the (?:passage|text|document)|"
               r"answer the (?:following )?question|from the (?:passage|text)|read the|context:|"
               r"passage:|document:",
               r"根据(?:上|下|以|文|材|段|资)|阅读|文中|材料|段落|依据|原文|从文|回答(?:问题|下)"),
    ),
    (
        "reasoning", 3.0,
        _words(r"how (?:many|much)|step[- ]by[- ]step|calculate|solve|prove|probability|"
               r"what is the (?:total|sum|area)|"
               r"per (?:hour|day|week|cent)|percent|altogether|remaining|logic(?:al)?|estimate how",
               r"多少|几(?:个|只|天|元|本|米|人|棵|条|张|名|次|小时|分)|计算|求解|证明|一共|"
               r"平均|还剩|推理|概率"),
    ),
    (
        "creative_writing", 3.5,
        _words(r"(?:write|compose|create) (?:\w+ ){0,4}(?:story|poem|essay|song|lyrics|"
               r"novel|blog|article|letter|speech|"
               r"script|ad|advertisement|post|review|travel\w*|email)|story about|poem|haiku|"
               r"imagine you|role-?play|"
               r"act as|pretend",
               r"写(?:一|篇|首|个|出)?.{0,12}(?:故事|诗|小说|文章|散文|作文|演讲|文案|歌词|"
               r"剧本|信|报告|方案|日记|广告)|"
               r"创作|编一|续写|扮演|充当|想象你"),
    ),
)  # fmt: skip

@dataclass(frozen=True, slots=True)
class _Shape:
    """What the rules look at."""

    instruction: str
    text: str
    code_share: float  # of lines
    has_fence: bool
    is_raw: bool  # /v1/completions: text to be continued


class Estimator(Protocol):
    """What a decision needs to know of a request beforehand."""

    def task(self, request: GenerationRequest) -> TaskEstimate:
        """The task, with a probability for each. An override is certain."""
        ...


class StructuralEstimator:
    """The rules of this file. They do not learn."""

    def task(self, request: GenerationRequest) -> TaskEstimate:
        """Task with probabilities; an override is certain."""
        if request.overrides.task is not None:
            label = request.overrides.task
            return TaskEstimate(label, 1.0, {task: float(task == label) for task in TASKS})
        points = dict.fromkeys(TASKS, 0.0)
        for task, value in _points(request):
            points[task] += value
        total = sum(math.exp(p) for p in points.values())
        probabilities = {task: math.exp(p) / total for task, p in points.items()}
        label = max(TASKS, key=lambda task: probabilities[task])
        return TaskEstimate(label, probabilities[label], probabilities)


def _points(request: GenerationRequest) -> Iterator[tuple[str, float]]:
    shape = _shape(request)
    is_long = len(shape.text) > 700
    yield "chat", 1.5
    if request.tools:
        yield "tool_call", 8.0
    if request.suffix:
        yield "code_completion", 8.0
    if request.response_format is not None:
        yield "tool_call", 1.0
    if shape.is_raw:
        yield ("code_completion", 3.0 + 4.0 * shape.code_share) if shape.code_share > 0.15 else ("chat", 0.5)
    for task, value, pattern in _VERBS:
        if pattern.search(shape.instruction):
            yield task, value
    has_code = shape.has_fence or shape.code_share > 0.25
    if has_code:
        yield "code_edit", 1.5
        yield "code_completion", 1.5
        yield "document_qa", -1.5
    else:
        yield "code_edit", -3.0
    if is_long and not has_code:
        yield "document_qa", 1.0
        yield "summarization", 0.7
        yield "reasoning", -1.5
        yield "chat", -0.5
        if shape.instruction.rstrip().endswith(("?", "？")):
            yield "document_qa", 1.5
    if len(shape.text) < 400 and len(re.findall(r"\d+", shape.text)) >= 3 and not has_code:
        yield "reasoning", 1.5


def _shape(request: GenerationRequest) -> _Shape:
    if request.messages is not None:
        users = [str(m["content"]) for m in request.messages if m["role"] == "user"]
        system = "".join(
            str(m["content"])[:_END_CHARS] + "\n" for m in request.messages if m["role"] == "system"
        )
        text = users[-1] if users else ""
    else:
        text, system = request.prompt if isinstance(request.prompt, str) else "", ""
    ends = text if len(text) <= 2 * _END_CHARS else f"{text[:_END_CHARS]}\n{text[-_END_CHARS:]}"
    sample = text[:20_000]
    lines = [line for line in sample.splitlines() if line.strip()]
    code_share = len(_CODE_LINE.findall(sample)) / len(lines) if lines else 0.0
    return _Shape(
        instruction=ends if system == "" else f"{system}{ends}",
        text=text,
        code_share=min(1.0, code_share),
        has_fence=bool(_FENCE.search(sample)),
        is_raw=request.messages is None,
    )
