"""A draft head: one decoder layer (or a few) on the target's hidden states, sharing its tables.

    hidden'[j] = decoder(fc([embedding of token j + 1; embedding of token j; hidden[j]]))
    logits = target's head(hidden'[j])

`hidden'[j]` stands in for the target's hidden state of token j + 1, so a chain feeds it back
(EAGLE: Li et al., arXiv:2401.15077). The embedding of token j (left out with `num_input_tokens` 1)
lets the one attention layer find what came after the same two tokens earlier. The head of the target
is cut down to the draft vocabulary, its most frequent tokens, since it would otherwise cost more than
all the rest.

On disk it is a folder with `model.safetensors` and a `config.json` whose architecture is
`DraftHeadForCausalLM`; `engine.training.export` writes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.errors import DrafterMismatch, ModelSourceError
from engine.kv.paged_cache import PagedCache
from engine.models.interface import LanguageModel
from engine.models.safetensors_weights import SafetensorsWeights
from engine.models.spec import ModelSpec
from engine.models.weights import WeightSource

ARCHITECTURE = "DraftHeadForCausalLM"
SHIPPED_PREFIX = "shipped:"
_SHIPPED = Path(__file__).parent.parent / "draft_heads"


@dataclass(frozen=True, slots=True)
class DraftHeadConfig:
    """What `config.json` says beside the weights."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int  # the target's
    target: str  # its name, for messages
    context_tokens: int  # how far back the head attends at least, and at most twice that
    draft_token_ids: tuple[int, ...]  # the draft vocabulary, ascending
    num_input_tokens: int = 1  # embeddings an entry is made of: of token j + 1, and of those before it

    def spec(self, target: ModelSpec) -> ModelSpec:
        """The head's shapes; raises DrafterMismatch where it was made for another target."""
        for name in ("hidden_size", "vocab_size"):
            mine, theirs = getattr(self, name), getattr(target, name)
            if mine != theirs:
                raise DrafterMismatch(
                    f"the draft head was made for {self.target!r} with {name} {mine}; the target"
                    f" {target.name!r} has {theirs}; train one for it with `specgate train-draft`"
                )
        return replace(head_spec(target, self.num_hidden_layers), intermediate_size=self.intermediate_size)


def head_spec(target: ModelSpec, num_layers: int = 1) -> ModelSpec:
    """The shapes of a draft head for `target`: plain Llama layers of the target's own width."""
    return replace(
        target,
        family="llama",
        num_layers=num_layers,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        name=f"{target.name}-draft-head",
    )


class DraftHead:
    """The head in the target's number format. Call under `torch.inference_mode()`."""

    def __init__(
        self, target: LanguageModel, spec: ModelSpec, source: WeightSource, config: DraftHeadConfig
    ) -> None:
        self.spec = spec
        self.context_tokens = config.context_tokens
        self.num_input_tokens = config.num_input_tokens
        self.token_ids = torch.tensor(config.draft_token_ids, dtype=torch.int64)
        self._target = target
        self._decoder, self._fc = target.with_layers(
            spec, source, self.token_ids, config.num_input_tokens
        )
        self.token_ids = self.token_ids.to(target.device)
        self.greedy_chains = self._decoder.greedy_chains(self._fc, config.draft_token_ids)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._decoder.device

    @property
    def num_bytes(self) -> int:
        """Weight memory it adds to the target's, in bytes."""
        return self._decoder.num_bytes + self._fc.num_bytes

    def new_cache(self, num_blocks: int, block_size: int) -> PagedCache:
        """An empty KV cache that fits the head."""
        return self._decoder.new_cache(num_blocks, block_size)

    def forward(
        self, batch: ForwardBatch, before: torch.Tensor, hidden: torch.Tensor, cache: PagedCache
    ) -> torch.Tensor:
        """Guessed hidden states, [num_entries, hidden], of the tokens `batch.token_ids`.

        before: [num_entries], the tokens before them; hidden: [num_entries, hidden], their (true or
        guessed) states.
        """
        num_entries = len(batch.token_ids)
        if self.num_input_tokens == 1:
            embedded = self._target.embed(batch.token_ids)
        else:
            both = self._target.embed(torch.cat((batch.token_ids, before)))
            embedded = torch.cat((both[:num_entries], both[num_entries:]), dim=1)
        inputs = self._fc(torch.cat((embedded, hidden.to(embedded.dtype)), dim=1))
        return self._decoder.forward(batch, cache, inputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Over the draft vocabulary, [rows, len(token_ids)] float32."""
        return self._decoder.logits(hidden)


def head_folder(source: str) -> Path:
    """The folder behind a path or `shipped:NAME`, one of those that come with the engine."""
    if source.startswith(SHIPPED_PREFIX):
        return _SHIPPED / source.removeprefix(SHIPPED_PREFIX)
    return Path(source).expanduser()


def is_draft_head(source: str) -> bool:
    """True where `config.json` names this architecture; for `shipped:NAME` always."""
    folder = head_folder(source)
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return ARCHITECTURE in settings.get("architectures", ())
    except (OSError, ValueError, AttributeError):
        return source.startswith(SHIPPED_PREFIX)  # whoever loads it as a model says what is wrong with it


def read_config(folder: Path) -> DraftHeadConfig:
    """Raises ModelSourceError for what is missing or no number."""
    path = folder / "config.json"
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = DraftHeadConfig(
            num_hidden_layers=int(settings["num_hidden_layers"]),
            hidden_size=int(settings["hidden_size"]),
            intermediate_size=int(settings["intermediate_size"]),
            vocab_size=int(settings["vocab_size"]),
            target=str(settings["target"]),
            context_tokens=int(settings["context_tokens"]),
            draft_token_ids=tuple(map(int, settings["draft_token_ids"])),
            num_input_tokens=int(settings.get("num_input_tokens", 1)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelSourceError(
            f"{path} does not describe a draft head ({error!r}); export it again."
        ) from error
    ids = config.draft_token_ids
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ModelSourceError(f"{path}: draft_token_ids must be ascending ids below {config.vocab_size}.")
    if config.context_tokens < 1 or config.num_hidden_layers < 1:
        raise ModelSourceError(f"{path}: context_tokens and num_hidden_layers must be at least 1.")
    if config.num_input_tokens not in (1, 2):
        raise ModelSourceError(f"{path}: num_input_tokens must be 1 or 2.")
    return config


def load_draft_head(source: str, target: LanguageModel) -> DraftHead:
    """The head in a folder, or `shipped:NAME`, for `target`. Raises ModelSourceError or DrafterMismatch."""
    folder = head_folder(source)
    config = read_config(folder)
    with SafetensorsWeights([folder / "model.safetensors"]) as weights:
        return DraftHead(target, config.spec(target.spec), weights, config)
