"""`specgate train-draft`: make a draft head for a target, in one folder that can be gone on with.

Three stages, each taken up where it was left: `collect` (the target answers the prompts), `train`,
`export` (a folder that `draft_model.source` names).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgate.train_classifier import read_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from engine.models.llama import CausalLM
    from engine.training.collect import CollectProgress
    from engine.training.corpus import Sample, TrainingPrompt
    from engine.training.train import Trainer, TrainProgress
    from specgate.backends.embedded.chat_template import ChatTemplate

_STAGES = ("collect", "train", "export")
_GROUP_CHARS = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", required=True, help="the target: folder, GGUF file or package:NAME")
    parser.add_argument(
        "--prompts", type=Path,
        help="JSONL: `messages` (and `tools`), `prompt` or `prompt_token_ids`; `task` and `group` if known",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("out/draft"), help="the run's folder")
    parser.add_argument("--stage", choices=("all", *_STAGES), default="all", help="default: all that is left")
    collecting = parser.add_argument_group("collect")
    collecting.add_argument("--max-tokens", type=int, default=192, help="of an answer")
    collecting.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer prompts are left out")
    collecting.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7], metavar="T", help="an answer at each"
    )
    collecting.add_argument(
        "--read-references", action="store_true",
        help="also learn from each prompt with its `reference`, read and not answered: a tenth of the time",
    )  # fmt: skip
    training = parser.add_argument_group("train")
    training.add_argument("--start", type=Path, metavar="HEAD", help="begin with the weights of this head")
    training.add_argument("--steps", type=int, default=2000)
    training.add_argument("--rounds", type=int, default=3, help="draft tokens unrolled")
    training.add_argument("--layers", type=int, default=1, help="decoder layers of the head")
    training.add_argument(
        "--input-tokens", type=int, choices=(1, 2), default=2, help="tokens whose embeddings the head reads"
    )
    training.add_argument("--vocabulary", type=int, default=4096, help="tokens that can be drafted")
    training.add_argument("--batch-tokens", type=int, default=1024)
    training.add_argument("--learning-rate", type=float, default=5e-4)
    training.add_argument("--evaluate-every", type=int, default=200, metavar="STEPS")
    training.add_argument("--checkpoint-s", type=float, default=120.0, metavar="SECONDS")
    training.add_argument("--context-tokens", type=int, default=256, help="how far back the head looks")
    training.add_argument("--device", default="cpu", help="cpu or cuda")
    training.add_argument("--threads", type=int, help="torch CPU threads")
    training.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Run the stages that are left. 0 fine, 1 it cannot be done."""
    import torch  # here and below: not for --help

    from engine.errors import EngineError
    from engine.training.corpus import CorpusError

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        if args.stage in ("all", "collect"):
            _collect(args)
        if args.stage in ("all", "train", "export"):
            _train_and_export(args)
    except (OSError, ValueError, EngineError, CorpusError) as error:
        print(f"train-draft: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _collect(args: argparse.Namespace) -> None:
    from engine.models.registry import load_model
    from engine.training.collect import CollectConfig, collect

    if args.prompts is None:
        raise ValueError("--prompts is needed to collect; name a JSONL file")
    prompts = list(read_prompts(args.prompts, args.model, args.read_references))
    config = CollectConfig(
        max_tokens=args.max_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        temperatures=tuple(args.temperatures),
        context_tokens=args.context_tokens,
        seed=args.seed,
    )
    target = load_model(args.model, device=args.device)
    collect(target, prompts, args.out / "corpus", config, time.monotonic, _show_collected)


def read_prompts(path: Path, source: str, has_references: bool) -> Iterator[TrainingPrompt]:
    """The file's prompts as token ids, and its texts with references. Raises ValueError naming the line."""
    from engine.training.corpus import TrainingPrompt

    encoder = _Encoder(source)
    for number, row in enumerate(read_rows(path), start=1):
        name, label = str(row.get("id", number)), str(row.get("task", ""))
        group = str(row.get("group") or _group_of(row))
        ids = row.get("prompt_token_ids")
        if ids is None and row.get("messages"):
            ids = encoder.chat(row["messages"], row.get("tools") or ())
        elif ids is None and isinstance(row.get("prompt"), str):
            ids = encoder.text(row["prompt"], is_prompt=True)
        elif ids is None:
            raise ValueError(f"{path}:{number}: has neither messages, prompt nor prompt_token_ids")
        prompt_ids = tuple(map(int, ids))
        yield TrainingPrompt(name, prompt_ids, group, label)
        reference = row.get("reference")
        if has_references and isinstance(reference, str) and reference:
            text_ids = (*prompt_ids, *encoder.text(reference, is_prompt=False))
            yield TrainingPrompt(name, prompt_ids, group, label, text_ids)


def _group_of(row: Mapping[str, Any]) -> str:
    """Rows about the same text stay together: the beginning of the longest message."""
    contents = [str(message.get("content") or "") for message in row.get("messages") or ()]
    text = max([*contents, str(row.get("prompt") or ""), str(row.get("prompt_token_ids") or "")], key=len)
    return hashlib.sha256(text[:_GROUP_CHARS].encode()).hexdigest()[:16]


class _Encoder:
    """Rows to token ids, as the server does it. Loaded when the first text comes."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Messages through the chat template; raises ValueError where there is none or it refuses them."""
        from specgate.backends.embedded.chat_template import TemplateFailed

        tokenizer = self._load()
        if self._template is None:
            raise ValueError(f"{self._source} has no chat template; give prompts as `prompt`")
        try:
            text = self._template.render(messages, tools)
        except TemplateFailed as error:
            raise ValueError(str(error)) from error
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, text: str, *, is_prompt: bool) -> list[int]:
        """Plain text, with the special tokens a prompt begins with where it is one."""
        return list(self._load().encode(text, add_special_tokens=is_prompt).ids)

    def _load(self) -> Tokenizer:
        from engine.models.source import resolve
        from engine.models.tokenizer import load_tokenizer
        from engine.models.tokenizer_settings import load_tokenizer_settings
        from specgate.backends.embedded.chat_template import ChatTemplate

        if self._tokenizer is None:
            files = resolve(self._source)
            settings = load_tokenizer_settings(files)
            special = {"bos_token": settings.bos_token or "", "eos_token": settings.eos_token or ""}
            if settings.chat_template is not None:
                self._template = ChatTemplate(settings.chat_template, special, time.time)
            self._tokenizer = load_tokenizer(files)
        return self._tokenizer


def _train_and_export(args: argparse.Namespace) -> None:
    from engine.models.llama import CausalLM
    from engine.models.registry import load_model
    from engine.training.corpus import CorpusError, read_corpus
    from engine.training.export import export_head

    samples = list(read_corpus(args.out / "corpus"))
    if not samples:
        raise CorpusError(
            f"{args.out / 'corpus'} holds no samples; run with --stage collect and --prompts first"
        )
    target = load_model(args.model, device="cpu", dtype="float32")
    assert isinstance(target, CausalLM)
    trainer = _trainer(args, target, samples)
    best = trainer.best() if args.stage == "export" else trainer.run(_show_trained)
    folder = args.out / "head"
    figures = {
        "acceptance_per_position": best.per_position,
        "mean_acceptance_length_at_3": best.mean_acceptance_length,
        "by_task": best.by_label,
        "num_drafts": best.num_drafts,
        "steps": trainer.state.step,
    }
    export_head(
        trainer.mean.module,
        trainer.target.draft_token_ids.tolist(),
        folder,
        target=target.spec.name,
        context_tokens=args.context_tokens,
        figures=figures,
    )
    print(json.dumps(figures, indent=1))  # noqa: T201
    print(f"{folder}: serve it with engine.draft_model.source: {folder}")  # noqa: T201


def _trainer(args: argparse.Namespace, target: CausalLM, samples: list[Sample]) -> Trainer:
    from engine.training.targets import TargetTables, frequent_tokens
    from engine.training.train import TrainConfig, Trainer

    path = args.out / "vocabulary.json"
    if not path.is_file():
        ids = frequent_tokens(samples, args.vocabulary, sorted(target.spec.eos_token_ids))
        path.write_text(json.dumps(ids), encoding="utf-8")
    config = TrainConfig(
        num_steps=args.steps,
        num_rounds=args.rounds,
        num_layers=args.layers,
        num_input_tokens=args.input_tokens,
        batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate,
        evaluate_every=args.evaluate_every,
        checkpoint_s=args.checkpoint_s,
        max_length=args.context_tokens + 64,
        seed=args.seed,
    )
    tables = TargetTables(target, json.loads(path.read_text(encoding="utf-8")), device=args.device)
    trainer = Trainer(tables, samples, args.out / "training", config, time.monotonic)
    if args.start is not None and trainer.state.step == 0:
        _start_from(trainer, args.start)
    return trainer


def _start_from(trainer: Trainer, folder: Path) -> None:
    """Take over a head's weights. Raises ValueError where it is no head for this target."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(folder / "model.safetensors")
        trainer.start_from(weights)
    except (SafetensorError, RuntimeError, KeyError, FileNotFoundError) as error:
        raise ValueError(f"{folder} holds no draft head for this target: {error}") from error


def _show_collected(progress: CollectProgress) -> None:
    left = progress.num_all - progress.num_done
    pace = progress.seconds / max(progress.num_done_now, 1)
    _say(
        f"collected {progress.num_done} of {progress.num_all} samples,"
        f" {progress.num_new_tokens} tokens in {progress.seconds:.0f} s;"
        f" about {left * pace / 60:.0f} min left"
    )


def _show_trained(progress: TrainProgress) -> None:
    left = f"{progress.eta_s / 60:.0f} min left"
    line = f"step {progress.step} of {progress.num_steps}, loss {progress.loss:.3f}, {left}"
    if progress.acceptance is not None:
        shares = " ".join(f"{share:.3f}" for share in progress.acceptance.per_position)
        length = progress.acceptance.mean_acceptance_length
        line += f"; accepted by position {shares}, mean length at 3 {length:.2f}"
    _say(line)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
