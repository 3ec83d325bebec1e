"""The engine process as shipped, but for faults that are switched on from outside."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.config import NgramConfig
from engine.engine import Engine
from engine.factory import build_engine
from engine.scheduler import ScheduledStep
from engine.spec.drafter import DraftContext
from engine.spec.ngram import NgramDrafter
from engine.spec.tree import DraftTree
from engine.spec.verify import VerifyResult
from specgate.backends.embedded import worker
from tests.drill.faults import FOLDER_VARIABLE, Faults

SLOW_S = 0.15


class DrilledEngine(Engine):
    """Dies by SIGKILL in the phase that is named, in the middle of a step."""

    faults: Faults

    def _begin(self, step: ScheduledStep) -> None:
        super()._begin(step)
        is_prefill = step.num_decodes < len(step.sequences)
        if step.sequences and self.faults.take("die in prefill" if is_prefill else "die in decode"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _verify(self, step: ScheduledStep, trees: list[DraftTree], logits: torch.Tensor) -> VerifyResult:
        if any(tree.token_ids for tree in trees) and self.faults.take("die in verify"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._verify(step, trees, logits)


class DrilledDrafter(NgramDrafter):
    """Prompt lookup that fails in the way that is named."""

    name = "drill"

    def __init__(self, faults: Faults, vocab_size: int) -> None:
        super().__init__(NgramConfig())
        self._faults = faults
        self._vocab_size = vocab_size

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        fault = self._faults.get("drafter")
        if fault == "exception":
            raise RuntimeError("broken on purpose")
        if fault == "oom":
            torch.empty(2**46)  # more than any machine has: the allocator's own refusal
        if fault == "invalid_draft":
            return [DraftTree.chain((self._vocab_size + 7,)) for _ in contexts]
        if fault == "nan":
            probs = torch.full((1, self._vocab_size), float("nan"))
            return [DraftTree.chain((1,), probs) for _ in contexts]
        if fault == "wrong":  # a sound draft, always mistaken: what it costs is time
            return [DraftTree.chain((context.token_ids[-1],)) for context in contexts]
        if fault == "timeout":
            time.sleep(SLOW_S)
        return super().propose(contexts)


def main() -> int:
    """As `worker.main`."""
    faults = Faults(Path(os.environ[FOLDER_VARIABLE]))

    def build(*args: Any) -> Engine:
        engine = build_engine(*args)
        engine.__class__ = DrilledEngine
        assert isinstance(engine, DrilledEngine)
        engine.faults = faults
        engine.set_drafters({**engine.drafters, "drill": DrilledDrafter(faults, engine.vocab_size)})
        return engine

    built: Callable[..., Engine] = build
    worker.build_engine = built
    return worker.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
