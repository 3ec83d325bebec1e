"""Every drafter on every task, alone and eight at a time, beside plain decoding and `auto`.

    python -m tests.bench.drafters [--data FILE.jsonl] [--rounds 2] [--json OUT]

One server has all methods loaded. A cell is a task at a concurrency; in each round its prompts are
asked under one arm after the other, in an order that rotates, so that a machine that drifts does it
to all alike. Requests are greedy. Nothing measured helps the next: the prefix cache is off, suffix
decoding keeps no past outputs (the same prompts come under every arm), and measured requests teach
nothing; what `auto` knows it learned in the warm-up, from other prompts under every arm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specgate.bench.client import Client
from specgate.bench.fleet import AUTO, ServerOptions, open_fleet
from specgate.bench.load import closed_loop
from specgate.bench.meta import machine, versions
from specgate.bench.progress import Meter, meter
from specgate.bench.record import Record, read_answer
from specgate.bench.runner import rotated
from specgate.bench.stats import Pairs, ratio_of_means
from specgate.bench.workload import Asking, Choice, Pool, Prompt, load_pool, make_job
from specgate.clock import SystemClock
from specgate.types import TASKS

BASELINE = "baseline"
ARMS = (BASELINE, "ngram", "suffix", "draft", "hybrid", AUTO)
ENGINE = "models.0.engine."
SETTINGS = (
    f"{ENGINE}enable_prefix_cache=false",
    f"{ENGINE}suffix.share_past_outputs=false",
    f"{ENGINE}hybrid.num_speculative_tokens=4",
    f"{ENGINE}num_blocks=1024",
)


@dataclass(frozen=True)
class Plan:
    """How much is asked."""

    arms: tuple[str, ...]
    concurrencies: tuple[int, ...]
    rounds: int
    prompts: int  # a task and round; at least as many as run at once
    asking: Asking


@dataclass(frozen=True)
class Turn:
    """One arm's part of one cell in one round."""

    task: str
    concurrency: int
    round: int
    arm: str
    seconds: float
    records: tuple[Record, ...]


async def ask(
    client: Client, prompts: Sequence[Prompt], concurrency: int, asking: Asking, *, learn: bool
) -> tuple[float, tuple[Record, ...]]:
    """All prompts, so many at a time: seconds, and what came."""
    jobs = [make_job(f"{client.arm}/{prompt.id}", prompt, asking) for prompt in prompts]
    jobs = [replace(job, body={**job.body, "specgate": {"learn": learn, "explore": learn}}) for job in jobs]
    began_s = client.clock.monotonic()
    answers = await closed_loop(iter(jobs), client.ask, client.clock, concurrency=concurrency)
    return client.clock.monotonic() - began_s, tuple(read_answer(answer, client.arm) for answer in answers)


async def warm_up(clients: dict[str, Client], pool: Pool, plan: Plan, keep: int, tell: Meter) -> None:
    """The last `keep` prompts of every task under every arm, at every concurrency."""
    for concurrency in plan.concurrencies:
        for arm, client in clients.items():
            tell.say(f"warming up: {arm} at {concurrency}")
            prompts = [prompt for rows in pool.by_task.values() for prompt in rows[len(rows) - keep :]]
            random.Random(concurrency).shuffle(prompts)
            await ask(client, prompts, concurrency, plan.asking, learn=True)


async def measure(clients: dict[str, Client], pool: Pool, plan: Plan, tell: Meter) -> list[Turn]:
    """All cells in all rounds under all arms."""
    turns: list[Turn] = []
    cells = [(c, task) for c in plan.concurrencies for task in pool.by_task]
    tell.begin(float(plan.rounds * len(cells) * len(clients)))
    for round_ in range(plan.rounds):
        for number, (concurrency, task) in enumerate(cells):
            rows = pool.by_task[task]
            num = max(plan.prompts, concurrency)
            prompts = [rows[(round_ * num + index) % len(rows)] for index in range(num)]
            for arm in rotated(list(clients), number + round_):
                seconds, records = await ask(clients[arm], prompts, concurrency, plan.asking, learn=False)
                turns.append(Turn(task, concurrency, round_, arm, seconds, records))
                tell.advance(1.0, f"round {round_ + 1}: {task} at {concurrency}")
    return turns


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """One arm in one cell. None where there is no data."""
    records = [r for turn in turns for r in turn.records if r.is_ok]
    tpots = [r.tpot_ms for r in records if r.tpot_ms is not None]
    told = [r.specgate for r in records]
    drafts, accepted = (
        sum(one.get(name, 0) for one in told) for name in ("num_drafts", "num_accepted_tokens")
    )
    steps = sum(one.get("num_target_steps", 0) for one in told)
    costs = [one.get("costs") or {} for one in told]
    device_s = sum(cost.get("device_s") or 0.0 for cost in costs)
    tokens = sum(r.num_output_tokens or 0 for r in records)
    return {
        "requests": len(records),
        "failed": sum(not r.is_ok for turn in turns for r in turn.records),
        "tpot_ms": sum(tpots) / len(tpots) if tpots else None,
        "output_tokens_per_s": tokens / sum(turn.seconds for turn in turns),
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "tokens_per_step": tokens / steps if steps else None,
        "draft_share": sum(cost.get("draft_s") or 0.0 for cost in costs) / device_s if device_s else None,
    }


def pairs(turns: Sequence[Turn], ours: str, theirs: str) -> Pairs:
    """TPOT of the same prompts under two arms; a round shares its luck."""
    found: dict[tuple[int, int, str], dict[str, float]] = defaultdict(dict)
    for turn in turns:
        for index, record in enumerate(sorted(turn.records, key=lambda r: r.prompt_id)):
            if record.tpot_ms is not None:
                found[turn.round, index, record.prompt_id][turn.arm] = record.tpot_ms
    both = [(key[0], times) for key, times in found.items() if ours in times and theirs in times]
    return Pairs(
        tuple(times[ours] for _, times in both),
        tuple(times[theirs] for _, times in both),
        tuple(group for group, _ in both),
    )


def num_different(turns: Sequence[Turn]) -> dict[str, int]:
    """Texts by arm that differ from the baseline's."""
    texts = {
        (turn.concurrency, turn.round, record.prompt_id): record.text
        for turn in turns if turn.arm == BASELINE for record in turn.records
    }  # fmt: skip
    found: dict[str, int] = defaultdict(int)
    for turn in turns:
        for record in turn.records:
            key = turn.concurrency, turn.round, record.prompt_id
            found[turn.arm] += key in texts and record.text != texts[key]
    return dict(found)


def summary(turns: Sequence[Turn], plan: Plan) -> list[dict[str, Any]]:
    """A row for each cell."""
    rows = []
    for concurrency in plan.concurrencies:
        for task in [task for task in TASKS if any(turn.task == task for turn in turns)]:
            cell = [turn for turn in turns if (turn.task, turn.concurrency) == (task, concurrency)]
            arms = {arm: figures([turn for turn in cell if turn.arm == arm]) for arm in plan.arms}
            row: dict[str, Any] = {"task": task, "concurrency": concurrency, "arms": arms}
            fixed = {arm: f["tpot_ms"] for arm, f in arms.items() if arm != AUTO and f["tpot_ms"] is not None}
            if fixed and AUTO in plan.arms:
                best = min(fixed, key=lambda arm: float(fixed[arm]))
                row |= {"best": best, "auto_to_best": ratio_of_means(pairs(cell, AUTO, best)).as_dict()}
            row["to_baseline"] = {
                arm: ratio_of_means(pairs(cell, arm, BASELINE)).as_dict()
                for arm in plan.arms
                if arm != BASELINE
            }
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]], arms: Sequence[str]) -> str:
    """In Markdown. A cell of an arm: TPOT in ms, output tokens/s, mean acceptance length, draft share."""
    lines = [
        "In a cell: TPOT in ms; output tokens/s; mean acceptance length; drafting's share of device time.",
        "",
        "| task | c | " + " | ".join(arms) + " | auto / best fixed, TPOT |",
        "| --- | --- |" + " --- |" * (len(arms) + 1),
    ]
    for row in rows:
        cells = []
        for arm in arms:
            f = row["arms"][arm]
            share = f["draft_share"]
            parts = [_number(f["tpot_ms"], 1), _number(f["output_tokens_per_s"], 0)]
            if arm != BASELINE:
                parts += [_number(f["mean_acceptance_length"], 2), "-" if share is None else f"{share:.0%}"]
            text = "; ".join(parts)
            cells.append(f"**{text}**" if arm == row.get("best") else text)
        ratio = row.get("auto_to_best")
        last = "-"
        if ratio and ratio["value"] is not None:
            bounds = f"{_number(ratio['low'], 3)} to {_number(ratio['high'], 3)}"
            last = f"{ratio['value']:.3f} ({bounds}; {row['best']})"
        lines.append(f"| {row['task']} | {row['concurrency']} | " + " | ".join(cells) + f" | {last} |")
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start, warm up, measure: the document."""
    clock = SystemClock()
    asking = Asking(max_tokens=args.max_tokens, ignore_eos=args.ignore_eos)
    plan = Plan(tuple(args.arms), tuple(args.concurrency), args.rounds, args.prompts, asking)
    # `--set` of the caller comes last and wins.
    server = ServerOptions(config=args.config, settings=(*SETTINGS, *args.set), is_shared=True)
    per_task = plan.rounds * max(plan.prompts, *plan.concurrencies) + args.warm_up
    choice = Choice(tuple(args.tasks or TASKS), args.lang, args.max_prompt_tokens, per_task)
    with meter(clock) as tell:
        async with open_fleet(server, plan.arms, clock, tell.say) as fleet:
            if args.data is None:
                choice = replace(choice, tasks=tuple(args.tasks or ()))
            pool = load_pool(args.data, choice, fleet.max_model_len, plan.asking.max_tokens)
            clients = dict(fleet.clients)
            await warm_up(clients, pool, plan, args.warm_up, tell)
            turns = await measure(clients, pool, plan, tell)
            details = (await fleet.state(plan.arms[0])).get("models", {}).get(clients[BASELINE].model_id, {})
    return {
        "command": " ".join(["python -m tests.bench.drafters", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "prompts": {task: len(rows) for task, rows in pool.by_task.items()},
        "engine": details.get("details", {}),
        "texts_unlike_baseline": num_different(turns),
        "errors": sorted({r.error for turn in turns for r in turn.records if r.error}),
        "rows": summary(turns, plan),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="JSONL of prompts with tasks; default: those of the demo")
    parser.add_argument("--config", type=Path, help="the server's; default: the shipped local one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the server's config"
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="default: all nine")
    parser.add_argument("--lang", default="en", choices=("en", "zh", "any"))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2, help="each with other prompts, as far as there are")
    parser.add_argument(
        "--prompts", type=int, default=4, help="a task and round; as many as run at once at least"
    )
    parser.add_argument("--warm-up", type=int, default=3, help="prompts a task that only warm up")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-tokens", type=int, default=400)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--json", type=Path, help="where all figures go")
    args = parser.parse_args()
    if BASELINE not in args.arms:
        parser.error(f"--arms needs {BASELINE}: the others are measured against it")
    document = asyncio.run(run(args))
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(table(document["rows"], args.arms))
    print("\nTexts unlike the baseline's:", document["texts_unlike_baseline"])
    if document["errors"]:
        print("Errors:", *document["errors"], sep="\n  ")


if __name__ == "__main__":
    main()
