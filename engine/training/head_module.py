"""The draft head as a trainable module, with the names its exported tensors have.

    x = fc([embedding of the next token; embedding of this one; hidden state])  ->  decoder layer(s)  ->  norm

The result stands in for the target's own hidden state one token further on: the target's head
reads the next token off it, and the head's next step takes it as input. Only `fc`, the layers and
the norm are learned; embedding and head are the target's (EAGLE: Li et al., arXiv:2401.15077).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.rotary import rotary_frequencies
from engine.models.llama import CausalLM, Layer
from engine.models.spec import ModelSpec


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, spec.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], past: list[tuple[torch.Tensor, ...]]
    ) -> torch.Tensor:
        """x: [batch, length, hidden]; `past` holds keys and values of the rounds before, and gets this one's.

        Round k's entry j stands for the k-th draft token after entry j - k + 1. So it sees the
        first round's entries up to j - k + 1, which came from true hidden states, and one entry of
        each later round: j - k + m of round m (training-time test: Li et al., arXiv:2503.01840).
        """
        spec, (batch, length, _) = self.spec, x.shape
        query = _rotate(self.q_proj(x).view(batch, length, spec.num_heads, -1), angles).transpose(1, 2)
        key = _rotate(self.k_proj(x).view(batch, length, spec.num_kv_heads, -1), angles).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, spec.num_kv_heads, -1).transpose(1, 2)
        group = spec.num_heads // spec.num_kv_heads
        past.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1).float()))
        rounds, scale = len(past), spec.head_dim**-0.5
        first_keys, first_values = past[0]
        scores = (query @ first_keys.transpose(2, 3)).float() * scale
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(1 - rounds)
        parts = [scores.masked_fill(~seen, -torch.inf)]
        later = [(k.roll(rounds - m, 2), v.roll(rounds - m, 2)) for m, (k, v) in enumerate(past[1:], start=2)]
        parts += [(query * k).sum(-1, keepdim=True).float() * scale for k, _ in later]
        weights = torch.cat(parts, -1).softmax(-1)
        attended = weights[..., :length] @ first_values
        for index, (_, v) in enumerate(later):
            attended = attended + weights[..., length + index, None] * v
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotate(heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """heads: [batch, length, num_heads, head_dim]; pairs (i, i + head_dim / 2) as the engine has them."""
    cos, sin = angles
    a, b = heads.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class _Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = _RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = _Attention(spec)
        self.post_attention_layernorm = _RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = _Mlp(spec)

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], past: list[tuple[torch.Tensor, ...]]
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, past)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    @torch.no_grad()
    def copy_from(self, layer: Layer, spec: ModelSpec) -> None:
        """Take a decoder layer's weights; biases and per-head norms, which a head lacks, are left behind."""
        qkv, gate_up = layer.qkv.weight, layer.gate_up.weight  # type: ignore[attr-defined]
        sizes = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        query, key, value = qkv.split(sizes)
        gate, up = gate_up.chunk(2)
        self.input_layernorm.weight.copy_(layer.attention_norm.weight)
        self.post_attention_layernorm.weight.copy_(layer.mlp_norm.weight)
        for to, weight in (
            (self.self_attn.q_proj, query),
            (self.self_attn.k_proj, key),
            (self.self_attn.v_proj, value),
            (self.self_attn.o_proj, layer.output.weight),  # type: ignore[attr-defined]
            (self.mlp.gate_proj, gate),
            (self.mlp.up_proj, up),
            (self.mlp.down_proj, layer.down.weight),  # type: ignore[attr-defined]
        ):
            to.weight.copy_(weight)


class _Model(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(spec) for _ in range(spec.num_layers))
        self.norm = _RMSNorm(spec.hidden_size, spec.rms_norm_eps)


class DraftHeadModule(nn.Module):
    """The trainable head; `state_dict()` has the tensor names of an exported head."""

    def __init__(self, spec: ModelSpec, num_input_tokens: int = 1) -> None:
        super().__init__()
        self.spec = spec
        self.num_input_tokens = num_input_tokens
        self.fc = nn.Linear((num_input_tokens + 1) * spec.hidden_size, spec.hidden_size, bias=False)
        self.model = _Model(spec)
        self._frequencies = rotary_frequencies(spec.rope, spec.head_dim)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, num_rounds: int) -> list[torch.Tensor]:
        """Entry j of round 1 takes `embedded[:, j]` (tokens j + 1 and j) and the target's `hidden[:, j]`.

        embedded: [batch, length, num_input_tokens * hidden_size], see `TargetTables.embed_entries`;
        hidden: [batch, length, hidden_size]. Returns each round's results, [batch, length,
        hidden_size] float32; round k's first k - 1 entries mean nothing.
        """
        places = torch.arange(embedded.shape[1], dtype=torch.float32, device=embedded.device)
        angles = (places[:, None] * self._frequencies.to(embedded.device))[None, :, None, :]
        turns = angles.cos(), angles.sin()
        past: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in self.model.layers]
        results: list[torch.Tensor] = []
        for _ in range(num_rounds):
            x = self.fc(torch.cat((embedded, hidden), -1)).float()
            for layer, cache in zip(self.model.layers, past, strict=True):
                x = layer(x, turns, cache)
            results.append(self.model.norm(x))
            hidden = results[-1].roll(1, 1)
        return results


def embed_entries(table: torch.Tensor, token_ids: torch.Tensor, num_input_tokens: int) -> torch.Tensor:
    """What entry j takes in of the text: tokens j + 1 and (of two) j. token_ids: [..., length + 1];
    the result is [..., length, num_input_tokens * hidden_size]."""
    embedded = F.embedding(token_ids, table)
    if num_input_tokens == 1:
        return embedded[..., 1:, :]
    return torch.cat((embedded[..., 1:, :], embedded[..., :-1, :]), -1)


@torch.no_grad()
def initialise(
    module: DraftHeadModule, target: CausalLM, texts: list[torch.Tensor], hidden: list[torch.Tensor]
) -> None:
    """Start from the target: its last layers and norm, and an `fc` that is fitted to feed them.

    `fc` is the ridge regression of the residual stream that enters those layers on (embedding of
    the token, that of the token before, hidden state of the token before). texts: [num_tokens] each;
    hidden: [num_tokens, hidden_size] each, the target's own.
    """
    num_layers = module.spec.num_layers
    module.model.norm.weight.copy_(target.norm.weight)
    for mine, theirs in zip(module.model.layers, target.layers[-num_layers:], strict=True):
        assert isinstance(mine, _Layer)
        mine.copy_from(theirs, module.spec)
    inputs, wanted = [], []
    for token_ids, states in zip(texts, hidden, strict=True):
        # The first tokens' residuals are huge (attention sinks) and would bend the fit.
        embedded = embed_entries(target.embedding, token_ids[1:], module.num_input_tokens)
        inputs.append(torch.cat((embedded, states[1:-1].float()), -1))
        wanted.append(_residuals(target, token_ids, target.spec.num_layers - num_layers)[2:])
    x, y = torch.cat(inputs).double(), torch.cat(wanted).double()
    gram = x.T @ x
    gram += torch.eye(gram.shape[0], dtype=gram.dtype) * gram.diagonal().mean() * 1e-3
    module.fc.weight.copy_(torch.linalg.solve(gram, x.T @ y).T)


class _NoNorm:
    """Stands where a model's final norm does, and lets the residual stream through."""

    num_bytes = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def after_adding(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + delta
        return total, total


def _residuals(target: CausalLM, token_ids: torch.Tensor, num_layers: int) -> torch.Tensor:
    """The residual stream after the first `num_layers` layers, [num_tokens, hidden]."""
    from engine.training.collect import hidden_states  # here, since that module needs the whole engine

    if num_layers == 0:
        return F.embedding(token_ids, target.embedding)
    part = target.first_layers(num_layers)
    part.norm = _NoNorm()  # type: ignore[assignment]
    return hidden_states(part, token_ids.tolist())
