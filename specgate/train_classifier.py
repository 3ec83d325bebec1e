"""`specgate train-classifier`: fit the shipped task classifier again from labelled requests."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--data", type=Path, required=True, help="JSONL, one labelled request a line")
    parser.add_argument(
        "--out", type=Path, default=Path("out/task_class.npz"), help="where the artefact goes"
    )
    parser.add_argument(
        "--per-task", type=int, metavar="N", help="made samples per task; default: as shipped"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the made samples")
    parser.add_argument("--json", type=Path, help="write the scores there too")


def run(args: argparse.Namespace) -> int:
    """Train, save, print the scores. 0 fine, 1 the data would not do."""
    from router_models.task_class import ArtefactError, TaskArtefact  # numpy and more: not for --help
    from router_models.training.fit import FitConfig, train

    config = FitConfig(seed=args.seed)
    if args.per_task is not None:
        config = replace(config, per_task=args.per_task)
    try:
        rows = read_rows(args.data)
        artefact = train(rows, config, report=_progress)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        artefact.save(args.out)
        TaskArtefact.load(args.out)
        if args.json is not None:
            args.json.write_text(json.dumps(artefact.meta, indent=1, ensure_ascii=False), encoding="utf-8")
    except (OSError, ValueError, ArtefactError) as error:
        print(f"train-classifier: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(artefact.meta["scores"], indent=1, ensure_ascii=False))  # noqa: T201
    print(f"{args.out}: version {artefact.version}, {args.out.stat().st_size / 1e6:.2f} MB")  # noqa: T201
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Labelled rows. Raises ValueError naming the line that is no JSON object."""
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: not a JSON object")
            rows.append(row)
    return rows


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
