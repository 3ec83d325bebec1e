"""Where to run and on what shapes: a GPU with real ones, or the CPU with tiny ones."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import triton

from engine.models.llama import CausalLM, build_model
from engine.models.rope import RopeSpec
from engine.models.spec import ModelSpec
from engine.models.weights import EMBEDDING, tensor_shapes


def _llama(
    name: str, hidden: int, inner: int, layers: int, heads: int, head_dim: int, is_tied: bool
) -> ModelSpec:
    return ModelSpec(
        family="llama",
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        max_model_len=16384,
        rope=RopeSpec(500000.0),
        is_tied=is_tied,
        name=name,
    )


LLAMA_1B = _llama("1B", 2048, 8192, 16, 32, 64, True)
LLAMA_8B = _llama("8B", 4096, 14336, 32, 32, 128, False)
TINY = replace(
    LLAMA_1B,
    name="tiny",
    vocab_size=160,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=256,
)


class RandomWeights:
    """Random tensors made where they are used, one at a time; logits spread by about 1."""

    def __init__(self, spec: ModelSpec, device: torch.device, seed: int = 0) -> None:
        self._shapes = tensor_shapes(spec)
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._device = device
        self._is_tied = spec.is_tied

    def names(self) -> frozenset[str]:
        """All names."""
        return frozenset(self._shapes)

    def load(self, name: str) -> torch.Tensor:
        """A new tensor."""
        shape = self._shapes[name]
        noise = torch.randn(shape, generator=self._generator, device=self._device)
        if name.endswith("norm.weight"):
            return 1.0 + 0.1 * noise
        if name == EMBEDDING and not self._is_tied:
            return noise
        return noise / math.sqrt(shape[-1])


@dataclass(frozen=True)
class Place:
    """A device and the shapes to try there."""

    device: torch.device
    models: tuple[ModelSpec, ...]
    exact_model: ModelSpec  # for greedy equality in float32
    vocab_size: int
    batches: tuple[int, ...]
    windows: tuple[int, ...]
    context: int
    num_new_tokens: int
    repeats: int

    @classmethod
    def cuda(cls) -> Place:
        """Shapes for one Hopper GPU; smaller cards leave out what does not fit."""
        free_bytes, _ = torch.cuda.mem_get_info()
        models = tuple(spec for spec in (LLAMA_1B, LLAMA_8B) if 2.6 * spec.num_parameters < free_bytes)
        return cls(
            device=torch.device("cuda"),
            models=models,
            exact_model=replace(LLAMA_1B, num_layers=6, vocab_size=32000, name="1B shapes, 6 layers"),
            vocab_size=128256,
            batches=(1, 4, 8, 16, 32, 64),
            windows=(1, 2, 4, 8),
            context=1024,
            num_new_tokens=96,
            repeats=20,
        )

    @classmethod
    def smoke(cls) -> Place:
        """The CPU, as small as it gets."""
        return cls(torch.device("cpu"), (TINY,), TINY, 160, (1, 2), (1, 3), 20, 4, 1)

    @property
    def is_cuda(self) -> bool:
        """False for the smoke run."""
        return self.device.type == "cuda"

    def describe(self) -> dict[str, object]:
        """The device and the libraries."""
        about: dict[str, object] = {"torch": torch.__version__, "triton": triton.__version__}
        if not self.is_cuda:
            return about | {"device": "CPU, interpreted: a test of this script alone"}
        properties = torch.cuda.get_device_properties(self.device)
        return about | {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }

    def model(self, spec: ModelSpec, dtype: torch.dtype) -> CausalLM:
        """A random model of `spec` here."""
        return build_model(spec, RandomWeights(spec, self.device), device=self.device, dtype=dtype)

    def seconds(self, work: Callable[[], object], repeats: int | None = None) -> float:
        """Median seconds of one call, once warm."""
        num = repeats or self.repeats
        for _ in range(3 if self.is_cuda else 0):
            work()
        times = sorted(self._once(work) for _ in range(num))
        return times[num // 2]

    def _once(self, work: Callable[[], object]) -> float:
        if not self.is_cuda:
            started_s = time.perf_counter()
            work()
            return time.perf_counter() - started_s
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def tidy(self) -> None:
        """Give memory back between sections."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def dtypes(place: Place) -> Iterator[torch.dtype]:
    """The types to hold kernels to."""
    yield from (torch.float32, torch.bfloat16, torch.float16)
