"""What is sent and when: prompts from a file, arrivals from a seed or a trace."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from specgate.bench.client import BenchError
from specgate.bench.record import Job
from specgate.types import TASKS

SAMPLINGS: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
}
_DEMO_TASKS = {"summary": "summarization", "Chinese": "chat"}  # kinds of the demo that are no task's name
_TEMPLATE_SHARE = 1.35  # other tokenizers and the chat template may need that much more
_TEMPLATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that can be asked under any sampling. `num_tokens` is the file's own count."""

    id: str
    task: str
    endpoint: str
    body: Mapping[str, Any]  # messages or prompt, and tools
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows of a data file are used."""

    tasks: tuple[str, ...] = ()  # empty: all there are, but for those with tools
    lang: str = "en"  # en, zh or any
    max_prompt_tokens: int = 600
    prompts_per_task: int = 12


@dataclass(frozen=True, slots=True)
class Asking:
    """How prompts are asked."""

    max_tokens: int = 64
    sampling: str = "greedy"
    ignore_eos: bool = False

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request's body. Sampled requests get a seed by prompt, so that all arms draw the same text."""
        body = {**prompt.body, "max_tokens": self.max_tokens, **SAMPLINGS[self.sampling]}
        if self.sampling != "greedy":
            body["seed"] = zlib.crc32(prompt.id.encode())
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


@dataclass(frozen=True, slots=True)
class Pool:
    """The prompts of a run by task, and a seeded way to draw from them."""

    by_task: Mapping[str, tuple[Prompt, ...]] = field(default_factory=dict)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(itertools.chain.from_iterable(self.by_task.values()))

    def draw(self, rng: random.Random, mix: Mapping[str, float] | None = None) -> Iterator[Prompt]:
        """Endless. Without a mix every task comes once in each round; with one, by its weights."""
        tasks = list(self.by_task)
        decks: dict[str, list[Prompt]] = {task: [] for task in tasks}
        weights = None if mix is None else [mix.get(task, 0.0) for task in tasks]
        while True:
            round_ = rng.sample(tasks, len(tasks)) if weights is None else rng.choices(tasks, weights)
            for task in round_:
                if not decks[task]:
                    decks[task] = rng.sample(self.by_task[task], len(self.by_task[task]))
                yield decks[task].pop()


def load_pool(path: Path | None, choice: Choice, max_model_len: int | None, max_tokens: int) -> Pool:
    """The prompts of `path` (None: those of the demo) that fit. Raises BenchError if none do."""
    if path is None:
        prompts = _demo_prompts()
    else:
        prompts = [
            prompt for prompt in _file_prompts(path, choice) if _fits(prompt, max_model_len, max_tokens)
        ]
    wanted = choice.tasks or tuple(task for task in TASKS if path is None or task != "tool_call")
    by_task: dict[str, tuple[Prompt, ...]] = {}
    for task in wanted:
        rows = [prompt for prompt in prompts if prompt.task == task]
        random.Random(f"prompts of {task}").shuffle(rows)
        if rows:
            by_task[task] = tuple(rows[: choice.prompts_per_task])
        elif choice.tasks:
            there = ", ".join(sorted({prompt.task for prompt in prompts})) or "none"
            raise BenchError(
                f"no prompt of task {task!r} fits; tasks with prompts that fit: {there}"
                f" (see --tasks, --lang, --max-prompt-tokens)"
            )
    if not by_task:
        raise BenchError(f"no prompt of {path} fits: raise --max-prompt-tokens or give another --lang")
    return Pool(by_task)


def _fits(prompt: Prompt, max_model_len: int | None, max_tokens: int) -> bool:
    if max_model_len is None or prompt.num_tokens is None:
        return True
    return prompt.num_tokens * _TEMPLATE_SHARE + _TEMPLATE_TOKENS + max_tokens <= max_model_len


def _file_prompts(path: Path, choice: Choice) -> Iterator[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the prompts in {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = _row_prompt(row, f"{path.stem}-{number}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(
                f"{path}:{number} is no prompt: it needs `messages` or `prompt`, and `task` ({error!r})"
            ) from error
        if choice.lang != "any" and row.get("lang", choice.lang) != choice.lang:
            continue
        if prompt.num_tokens is not None and prompt.num_tokens > choice.max_prompt_tokens:
            continue
        yield prompt


def _row_prompt(row: Mapping[str, Any], default_id: str) -> Prompt:
    if row.get("messages"):
        endpoint, body = "chat/completions", {"messages": row["messages"]}
        if row.get("tools"):
            body["tools"] = row["tools"]
    else:
        endpoint, body = "completions", {"prompt": row["prompt"]}
    return Prompt(str(row.get("id", default_id)), str(row["task"]), endpoint, body, row.get("prompt_tokens"))


def _demo_prompts() -> list[Prompt]:
    text = resources.files("specgate").joinpath("demo_prompts.jsonl").read_text(encoding="utf-8")
    prompts = []
    for row in map(json.loads, text.splitlines()):
        task = _DEMO_TASKS.get(row["kind"], row["kind"].lower().replace(" ", "_"))
        body = {key: row["body"][key] for key in ("messages", "prompt") if key in row["body"]}
        prompts.append(Prompt(f"demo: {row['kind']}", task, row["endpoint"], body))
    return prompts


def poisson_arrivals(rate: float, duration_s: float, rng: random.Random) -> list[float]:
    """Arrivals of a Poisson process of `rate` per second within `duration_s`."""
    arrivals = []
    at_s = rng.expovariate(rate)
    while at_s < duration_s:
        arrivals.append(at_s)
        at_s += rng.expovariate(rate)
    return arrivals


def make_job(name: str, prompt: Prompt, asking: Asking, arrival_s: float = 0.0) -> Job:
    """One request; `name` is its id."""
    return Job(name, prompt.id, prompt.task, prompt.endpoint, asking.body(prompt), arrival_s)


def make_jobs(
    name: str, arrivals: Sequence[float], prompts: Iterator[Prompt], asking: Asking
) -> tuple[Job, ...]:
    """One job per arrival. `name` makes their ids unique."""
    return tuple(
        make_job(f"{name}/{index}", prompt, asking, at_s)
        for index, (at_s, prompt) in enumerate(zip(arrivals, prompts, strict=False))
    )
