"""`specgate bench run | sweep | replay`: options in, files and a table out."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from specgate.bench.setting import Options

DEFAULT_ARMS = "auto,baseline,ngram,draft"
DEFAULT_OUT = Path("out/bench")
SHIPPED = "(shipped)"
_Item = TypeVar("_Item")

_REPEATS = "of everything, each on servers started anew"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The three benches and their options."""
    benches = parser.add_subparsers(metavar="BENCH", dest="bench", required=True)

    run_ = benches.add_parser("run", help="one arm at a fixed concurrency or a Poisson rate")
    run_.add_argument("--arm", default="auto", help="auto, baseline, a loaded method, or default (no header)")
    load = run_.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=_positive_int, default=1, metavar="N", help="requests open at once"
    )
    load.add_argument("--rate", type=_positive, metavar="R", help="Poisson arrivals per second instead")
    load.add_argument(
        "--find-concurrency", action="store_true", help="the largest concurrency that meets the SLOs"
    )
    run_.add_argument("--max-concurrency", type=_positive_int, default=64, metavar="N", help="of the search")
    run_.add_argument(
        "--slo-share", type=_share, default=0.95, metavar="P", help="of the requests that must meet the SLOs"
    )
    run_.add_argument("--duration", type=_positive, default=30.0, metavar="SECONDS", help="of each load")
    _add_common(run_, None)

    sweep = benches.add_parser("sweep", help="arms x rates, the same requests for each arm")
    sweep.add_argument("--arms", type=_names, default=_names(DEFAULT_ARMS), help=f"default {DEFAULT_ARMS}")
    sweep.add_argument(
        "--fractions", type=_list_of(_positive), default=(0.2, 0.5, 0.8, 1.1), metavar="F,F,...",
        help="rates, as fractions of the baseline's measured capacity (default 0.2,0.5,0.8,1.1)",
    )  # fmt: skip
    sweep.add_argument(
        "--duration", type=_positive, default=60.0, metavar="SECONDS", help="of each arm at each rate"
    )
    sweep.add_argument(
        "--slice", type=_positive, default=20.0, metavar="SECONDS",
        help="arms take turns in slices of about this length (default 20)",
    )  # fmt: skip
    sweep.add_argument("--repeats", type=_positive_int, default=1, metavar="N", help=_REPEATS)
    _add_common(sweep, DEFAULT_OUT)
    _add_capacity(sweep)

    replay = benches.add_parser("replay", help="a load trace, or a workload that shifts every minute")
    _add_replay(replay)
    _add_common(replay, DEFAULT_OUT)
    _add_capacity(replay)


def run(args: argparse.Namespace) -> int:
    """Run the bench that was asked for. Raises BenchError."""
    from specgate.bench.client import BenchError
    from specgate.bench.output import write_all
    from specgate.bench.progress import meter
    from specgate.clock import SystemClock

    clock = SystemClock()
    for fault in _faults(args):
        raise BenchError(fault)
    with meter(clock) as shown:
        document, measured = _event_loop(_BENCHES[args.bench](args, clock, shown))
    write_all(document, measured, args.out, with_records=args.records)
    return 0


def _faults(args: argparse.Namespace) -> Iterator[str]:
    """Options that miss another, or that would do nothing."""
    if args.url is not None:
        started = {"--config": args.config, "--set": args.settings, "--imposed": args.imposed,
                   "--share-server": args.share_server, "--lockstep": args.lockstep}  # fmt: skip
        yield from (
            f"{name} is for servers started here: leave out --url" for name in started if started[name]
        )
    if args.lockstep is not None:
        if args.share_server:
            yield "--lockstep stops one arm's server while another's runs: leave out --share-server"
        if args.bench == "run" or len(args.arms) < 2:
            yield "--lockstep is for several arms: there is one"
    if args.bench == "run" and args.find_concurrency:
        if args.slo_ttft_ms is None and args.slo_tpot_ms is None:
            yield "--find-concurrency needs --slo-ttft-ms, --slo-tpot-ms or both"
        if len(args.sampling) > 1:
            yield "--find-concurrency looks at one --sampling at a time"
    if args.bench == "replay":
        if args.shift is None and args.trace is None:
            yield "replay needs --trace FILE or --shift"
        if len(args.sampling) > 1:
            yield "replay takes one --sampling at a time"
        of_trace = {"--stretch": args.stretch, "--start": args.start, "--duration": args.duration,
                    "--jitter": args.jitter}  # fmt: skip
        if args.shift is not None:
            yield from (
                f"{name} does nothing with --shift" for name in of_trace if of_trace[name] is not None
            )
        elif args.capacity is not None:
            yield "--capacity does nothing with a trace, which has its own rates"


def _event_loop(work: Any) -> Any:
    import uvloop

    async def until_told() -> Any:
        task = asyncio.current_task()
        assert task is not None
        if threading.current_thread() is threading.main_thread():  # no other is told of signals
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(until_told())
        except asyncio.CancelledError:  # its servers are ended by now
            raise SystemExit(128 + signal.SIGTERM) from None


async def _run(args: argparse.Namespace, clock: Any, meter: Any) -> Any:
    from specgate.bench.single import Single, run_single

    load = Single(
        concurrency=args.concurrency,
        rate=args.rate,
        duration_s=args.duration,
        is_search=args.find_concurrency,
        slo_share=args.slo_share,
        max_concurrency=args.max_concurrency,
    )
    return await run_single(_options(args, (args.arm,)), load, clock, meter)


async def _sweep(args: argparse.Namespace, clock: Any, meter: Any) -> Any:
    from specgate.bench.sweep import Sweep, run_sweep

    sweep = Sweep(
        fractions=args.fractions, duration_s=args.duration, slice_s=args.slice, repeats=args.repeats
    )
    return await run_sweep(_options(args, args.arms), sweep, clock, meter)


async def _replay(args: argparse.Namespace, clock: Any, meter: Any) -> Any:
    from specgate.bench.replay import Replay, load_shift, run_replay, run_shift

    options = _options(args, args.arms)
    if args.shift is not None:
        shift = load_shift(None if args.shift == SHIPPED else Path(args.shift))
        shift = replace(shift, trace=args.trace, repeats=args.repeats)
        if args.window is not None:
            shift = replace(shift, segment_s=args.window)
        return await run_shift(options, shift, clock, meter)
    replay = Replay(
        trace=args.trace,
        stretch=args.stretch or 1.0,
        start_s=args.start or 0.0,
        duration_s=args.duration or 300.0,
        window_s=args.window or 60.0,
        max_output_tokens=args.max_tokens,
        jitter_s=args.jitter or 0.0,
        repeats=args.repeats,
    )
    return await run_replay(options, replay, clock, meter)


_BENCHES: dict[str, Callable[..., Any]] = {"run": _run, "sweep": _sweep, "replay": _replay}


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--arms", type=_names, default=_names(DEFAULT_ARMS), help=f"default {DEFAULT_ARMS}")
    add(
        "--trace", type=Path, metavar="FILE",
        help="JSONL of arrival_s, input_tokens, output_tokens; with --shift it gives arrivals their bursts",
    )  # fmt: skip
    add(
        "--shift", nargs="?", const=SHIPPED, metavar="FILE",
        help="instead: a YAML schedule of task mixes and rates; without FILE the shipped one",
    )  # fmt: skip
    add("--stretch", type=_positive, metavar="F", help="4 replays four times slower")
    add("--start", type=_not_negative, metavar="SECONDS", help="where to begin, once stretched")
    add("--duration", type=_positive, metavar="SECONDS", help="how much of it (default 300)")
    add("--window", type=_positive, metavar="SECONDS", help="arms take turns in windows (default 60)")
    add("--jitter", type=_not_negative, metavar="SECONDS", help="for arrivals that come in steps")
    add("--repeats", type=_positive_int, default=1, metavar="N", help=_REPEATS)


def _add_common(parser: argparse.ArgumentParser, out: Path | None) -> None:
    """Servers, prompts, sampling, output."""
    add = parser.add_argument
    add("--url", help="bench a running server, of any OpenAI kind, instead of starting one per arm")
    add("--token", default=os.environ.get("SPECGATE_TOKEN"), help="its key (default $SPECGATE_TOKEN)")
    add("--config", type=Path, metavar="FILE", help="config of the servers that are started")
    add(
        "--set", action="append", default=[], dest="settings", metavar="dotted.key=value",
        help="override one of their settings; may be repeated",
    )  # fmt: skip
    add("--share-server", action="store_true", help="one server for all arms: auto then learns from all")
    add(
        "--lockstep", type=_positive, metavar="SECONDS",
        help="arms run a slice all at once, this long each in turn, their clocks stopped in between: what"
        " the machine does for longer than that it does to all of them",
    )  # fmt: skip
    add(
        "--imposed", type=_list_of(_share), default=(), metavar="P,P,...",
        help="impose the draft arm's acceptance: chance per position, given that those before were right",
    )  # fmt: skip
    add("--data", type=Path, metavar="FILE", help="JSONL of prompts with a task each; default: the demo's")
    add("--tasks", type=_names, default=(), metavar="A,B,...", help="only these tasks")
    add("--lang", default="en", choices=("en", "zh", "any"), help="only prompts in this language")
    add("--max-prompt-tokens", type=_positive_int, default=600, metavar="N", help="as counted in the file")
    add("--prompts-per-task", type=_positive_int, default=12, metavar="N", help="distinct prompts of a task")
    add("--max-tokens", type=_positive_int, default=64, metavar="N", help="longest answer")
    add("--ignore-eos", action="store_true", help="every answer has --max-tokens tokens")
    add(
        "--sampling", type=_samplings, default=("greedy",), metavar="A,B,...",
        help="greedy, temperature (0.8), top_p (0.8, 0.9): everything once for each",
    )  # fmt: skip
    add("--slo-ttft-ms", type=_positive, metavar="MS", help="for goodput")
    add("--slo-tpot-ms", type=_positive, metavar="MS", help="for goodput")
    add("--warmup", type=_not_negative, default=8.0, metavar="SECONDS", help="of each arm; not counted")
    add("--timeout", type=_positive, default=600.0, metavar="SECONDS", help="of a request")
    add("--seed", type=int, default=0, help="of arrivals and prompts")
    add("--out", type=Path, default=out, metavar="DIR", help=f"for report.json and .html (default {out})")
    add("--records", action="store_true", help="also write records.jsonl: every request with its text")


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--capacity", type=_positive, metavar="R", help="requests/s; default: measured on baseline")
    add(
        "--capacity-s", type=_positive, default=15.0, metavar="SECONDS",
        help="of each closed loop while the capacity is measured (default 15)",
    )  # fmt: skip
    add(
        "--capacity-concurrency", type=_list_of(_positive_int), default=(8, 16, 32), metavar="N,N,...",
        help="closed loops tried, until more gives no more (default 8,16,32)",
    )  # fmt: skip


def _options(args: argparse.Namespace, arms: tuple[str, ...]) -> Options:
    from specgate.bench.capacity import Slo
    from specgate.bench.fleet import ServerOptions
    from specgate.bench.setting import Options
    from specgate.bench.workload import Asking, Choice

    server = ServerOptions(
        url=args.url,
        config=args.config,
        settings=tuple(args.settings),
        token=args.token,
        timeout_s=args.timeout,
        is_shared=args.share_server,
        imposed=args.imposed,
        lockstep_s=args.lockstep,
    )
    return Options(
        arms=arms,
        server=server,
        data=args.data,
        choice=Choice(args.tasks, args.lang, args.max_prompt_tokens, args.prompts_per_task),
        asking=Asking(args.max_tokens, ignore_eos=args.ignore_eos),
        samplings=args.sampling,
        slo=Slo(args.slo_ttft_ms, args.slo_tpot_ms),
        warmup_s=args.warmup,
        capacity=getattr(args, "capacity", None),
        capacity_s=getattr(args, "capacity_s", 15.0),
        concurrencies=getattr(args, "capacity_concurrency", (8, 16, 32)),
        seed=args.seed,
    )


# --- values ----------------------------------------------------------------------------------


def _list_of(item: Callable[[str], _Item]) -> Callable[[str], tuple[_Item, ...]]:
    def read(text: str) -> tuple[_Item, ...]:
        items = tuple(item(part.strip()) for part in text.split(",") if part.strip())
        if not items:
            raise argparse.ArgumentTypeError("give at least one")
        if len(set(items)) < len(items):
            raise argparse.ArgumentTypeError(f"{text!r} names something twice")
        return items

    return read


def _names(text: str) -> tuple[str, ...]:
    return _list_of(str)(text)


def _samplings(text: str) -> tuple[str, ...]:
    from specgate.bench.workload import SAMPLINGS

    names = _names(text)
    for name in names:
        if name not in SAMPLINGS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SAMPLINGS)}")
    return names


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not -1e12 < value < 1e12:  # NaN fails too
        raise argparse.ArgumentTypeError(f"{text!r} is no usable number")
    return value


def _positive(text: str) -> float:
    if (value := _number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _not_negative(text: str) -> float:
    if (value := _number(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _positive_int(text: str) -> int:
    value = _positive(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is no whole number")
    return int(value)
