"""The `specgate` command: thin commands over the parts that do the work.

Exit codes: 0 fine, 1 the work failed, 2 wrong use. Errors are one sentence on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgate import __version__, train_classifier, train_draft
from specgate.bench.command import add_arguments
from specgate.canary_command import CanaryError, add_canary_arguments, run_canary
from specgate.report.command import ReportError, add_report_arguments, run_report

DEFAULT_URL = "http://127.0.0.1:8080"
FINE, FAILED, WRONG_USE = 0, 1, 2
INTERRUPTED = 130  # as shells say it: 128 and the number of SIGINT


class CommandError(Exception):
    """A command cannot go on. The message is one sentence saying what to do next."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except CommandError as error:
        print(f"specgate: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("specgate: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
    else:
        return code
    return FINE


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="specgate",
        description="Serve a language model; decide per request how it is decoded, and say why.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="run the server until SIGTERM or SIGINT")
    serve.add_argument("--config", type=Path, metavar="FILE", help="default: the shipped local config")
    serve.add_argument("--host", help="address to listen on")
    serve.add_argument("--port", type=int, help="port to listen on; 0 picks a free one and prints it")
    serve.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="dotted.key=value",
        help="override one setting; may be repeated",
    )  # fmt: skip
    serve.add_argument(
        "--bench", action="store_true", help="a server to be measured only: allows engine.imposed"
    )
    serve.set_defaults(run=_serve)

    demo = commands.add_parser("demo", help="start a server, send it real prompts, print what was decided")
    demo.add_argument("--config", type=Path, metavar="FILE", help="the server's config")
    demo.add_argument("--json", type=Path, metavar="FILE", dest="json_file", help="write the results here")
    demo.set_defaults(run=_demo)

    check = commands.add_parser("check-config", help="say whether config files are valid")
    check.add_argument("files", nargs="*", type=Path, metavar="FILE")
    check.add_argument("--schema", action="store_true", help="print the JSON schema of a config file")
    check.set_defaults(run=_check_config)

    explain = commands.add_parser("explain", help="what would be (was) decided for a request, and why")
    explain.add_argument("request", nargs="?", metavar="REQUEST.json", help="a request body; - is stdin")
    explain.add_argument("--url", default=DEFAULT_URL, help=f"the server to ask (default {DEFAULT_URL})")
    explain.add_argument(
        "--token", default=os.environ.get("SPECGATE_TOKEN"), help="admin token (default $SPECGATE_TOKEN)"
    )
    explain.add_argument("--log", type=Path, metavar="FILE", help="read a decision log instead of asking")
    explain.add_argument("--line", type=int, metavar="N", help="line of the log, from 1 (default the last)")
    explain.set_defaults(run=_explain)

    bench = commands.add_parser("bench", help="measure and compare arms under load")
    add_arguments(bench)
    bench.set_defaults(run=_bench)

    trainer = commands.add_parser("train-classifier", help="fit the task classifier again from labelled data")
    train_classifier.add_arguments(trainer)
    trainer.set_defaults(run=train_classifier.run)

    distiller = commands.add_parser("train-draft", help="make a draft head for a target model")
    train_draft.add_arguments(distiller)
    distiller.set_defaults(run=train_draft.run)

    canary = commands.add_parser("canary", help="rollouts: status, promote, pause, resume, rollback")
    add_canary_arguments(canary, DEFAULT_URL)
    canary.set_defaults(run=_canary)

    report = commands.add_parser("report", help="what was spent and saved, from the decision log")
    add_report_arguments(report)
    report.set_defaults(run=_report)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def _serve(args: argparse.Namespace) -> int:
    from specgate.app import run
    from specgate.config import load_config
    from specgate.errors import ConfigError

    settings = list(args.settings)
    settings += [f"server.host={args.host}"] if args.host is not None else []
    settings += [f"server.port={args.port}"] if args.port is not None else []
    settings += ["benching=true"] if args.bench else []
    config = _load(args.config, settings)
    try:
        # Without a file a hang-up ends the server, as it ends any program of a terminal that closes.
        return run(config, (lambda: load_config(args.config, settings)) if args.config else None)
    except ConfigError as error:  # in a rollout's file
        raise CommandError(str(error), WRONG_USE) from error
    except OSError as error:
        raise CommandError(f"cannot serve: {error}; give another --host or --port") from error


def _demo(args: argparse.Namespace) -> int:
    from specgate.demo import DemoError, run_demo

    try:
        return FINE if run_demo(args.config, args.json_file) else FAILED
    except DemoError as error:
        raise CommandError(str(error)) from error


def _check_config(args: argparse.Namespace) -> int:
    from specgate.config import config_json_schema

    if args.schema:
        print(json.dumps(config_json_schema(), indent=2))
        return FINE
    if not args.files:
        raise CommandError("check-config needs a FILE, or --schema", WRONG_USE)
    code, rollouts = FINE, []
    for path in args.files:
        try:
            rollouts += _check_file(path)
        except CommandError as error:
            print(error, file=sys.stderr)
            code = FAILED
        else:
            print(f"{path}: valid")
    for why in _conflicts(rollouts):
        print(why, file=sys.stderr)
        code = FAILED
    return code


def _check_file(path: Path) -> list[Any]:
    """The rollout in it, if it is one's. Raises CommandError."""
    from specgate.config import is_rollout, load_rollout
    from specgate.errors import ConfigError

    try:
        if is_rollout(path):
            return [load_rollout(path)]
    except ConfigError as error:
        raise CommandError(str(error), WRONG_USE) from error
    _load(path, [])
    return []


def _conflicts(rollouts: Sequence[Any]) -> list[str]:
    from specgate.policy.overlay import conflict

    pairs = ((a, b) for i, a in enumerate(rollouts) for b in rollouts[i + 1 :])
    return [why for a, b in pairs if (why := conflict(a, b)) is not None]


def _load(path: Path | None, settings: Sequence[str]) -> Any:
    from specgate.config import load_config
    from specgate.errors import ConfigError

    try:
        return load_config(path, settings)
    except ConfigError as error:
        raise CommandError(str(error), WRONG_USE) from error


def _explain(args: argparse.Namespace) -> int:
    from rich.console import Console

    from specgate.explain import render

    if (args.request is None) == (args.log is None):
        raise CommandError("explain needs either REQUEST.json or --log FILE", WRONG_USE)
    explanation = _logged(args.log, args.line) if args.log else _asked(args)
    Console(soft_wrap=False).print(render(explanation, is_past=args.log is not None))
    return FINE


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """What the running server would decide for the request."""
    import httpx

    try:
        text = sys.stdin.read() if args.request == "-" else Path(args.request).read_text(encoding="utf-8")
        body = json.loads(text)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {args.request} as JSON: {error}", WRONG_USE) from error
    if not isinstance(body, dict):
        raise CommandError(f"{args.request} is no request body: it must be a JSON object", WRONG_USE)
    headers = {"Authorization": f"Bearer {args.token}"} if args.token else {}
    try:
        response = httpx.post(f"{args.url.rstrip('/')}/admin/explain", json=body, headers=headers, timeout=30)
        answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise CommandError(f"no server answers at {args.url}: run `make serve` or give --url") from error
    if response.status_code != 200:
        message = answer.get("error", {}).get("message", response.text)
        raise CommandError(f"{args.url} answered {response.status_code}: {message}")
    return dict(answer)


def _logged(path: Path, line: int | None) -> dict[str, Any]:
    """A decision as it was logged; by default the last."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read the decision log {path}: {error}", WRONG_USE) from error
    if not lines:
        raise CommandError(f"the decision log {path} is empty: send the server a request first")
    chosen = _last_decision(lines) if line is None else line
    if not 1 <= chosen <= len(lines):
        raise CommandError(f"--line {chosen}: {path} has lines 1 to {len(lines)}", WRONG_USE)
    try:
        return dict(json.loads(lines[chosen - 1]))
    except (TypeError, ValueError) as error:
        raise CommandError(f"line {chosen} of {path} is not a logged decision: {error}") from error


def _last_decision(lines: Sequence[str]) -> int:
    """Its number, from 1. Lines of another kind (consistency checks) come in between."""
    for number in range(len(lines), 0, -1):
        if '"kind":"consistency_check"' not in lines[number - 1]:
            return number
    return len(lines)


def _bench(args: argparse.Namespace) -> int:
    from specgate.bench.client import BenchError
    from specgate.bench.command import run

    try:
        return run(args)
    except BenchError as error:
        raise CommandError(str(error)) from error


def _canary(args: argparse.Namespace) -> int:
    try:
        run_canary(args)
    except CanaryError as error:
        raise CommandError(str(error)) from error
    return FINE


def _report(args: argparse.Namespace) -> int:
    try:
        run_report(args)
    except ReportError as error:
        raise CommandError(str(error), WRONG_USE) from error
    return FINE


def _version(_args: argparse.Namespace) -> int:
    print(f"specgate {__version__}")
    return FINE
