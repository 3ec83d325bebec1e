"""What `/metrics` reads at the moment of a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from engine.types import EngineLoad
from specgate.pipeline import ServedModel
from specgate.telemetry.device import GpuReader
from specgate.telemetry.metrics import LiveReadings
from specgate.telemetry.process import ProcessReader

_WEIGHTS = ("target_weights", "draft_weights")
_KV = ("target_kv", "draft_kv")


def live_reader(
    models: Mapping[str, ServedModel], process: ProcessReader, gpus: GpuReader | None
) -> Callable[[], LiveReadings]:
    """Over all models. `gpus` None: utilisation and memory are those of our processes."""

    def read() -> LiveReadings:
        pairs = [(model, model.backend.load()) for model in models.values()]
        loads = [load for _, load in pairs]
        return LiveReadings(
            num_running=sum(_num_running(model, load) for model, load in pairs),
            num_waiting=sum(model.admission.num_queued + load.num_waiting for model, load in pairs),
            kv_blocks={
                "free": sum(load.num_free_blocks - load.num_cached_blocks for load in loads),
                "cached": sum(load.num_cached_blocks for load in loads),
                "used": sum(load.num_used_blocks for load in loads),
            },
            num_engine_restarts=sum(model.backend.status().num_restarts for model in models.values()),
            num_retries=sum(model.backend.status().num_retries for model in models.values()),
            retried_s=sum(model.backend.status().retried_s for model in models.values()),
            utilization=process.utilization() if gpus is None else gpus.utilization(),
            memory_bytes=memory_by_part(
                [model.backend.card.details.get("memory_bytes", {}) for model in models.values()],
                process.memory_bytes(),
                None if gpus is None else gpus.memory_bytes(),
            ),
        )

    return read


def _num_running(model: ServedModel, load: EngineLoad) -> int:
    """The engine's count is as of its last step; a request that it has not seen yet is not lost."""
    return max(load.num_running, model.admission.num_running - load.num_waiting)


def memory_by_part(
    models: Sequence[Mapping[str, int]], resident: int | None, on_gpus: int | None
) -> dict[str, int]:
    """All models' parts together; `other` is what is used beside them: on the GPUs where they say, else
    what the engine said. On the CPU, what the processes hold beside the weights: the pages of a KV cache
    come into being as its blocks are first used."""
    parts: Counter[str] = Counter()
    for model in models:
        parts.update(model)
    if on_gpus is not None:
        parts["other"] = max(0, on_gpus - sum(parts[name] for name in _WEIGHTS + _KV))
    elif "other" not in parts and resident is not None:
        parts["other"] = max(0, resident - sum(parts[name] for name in _WEIGHTS))
    return dict(parts)
