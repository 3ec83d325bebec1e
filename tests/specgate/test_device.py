"""GPU readings through NVML's functions, which a scripted module stands in for; memory by part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.config import EngineConfig
from specgate.config import ModelConfig
from specgate.live_readings import memory_by_part
from specgate.telemetry.device import GpuReader, find_gpus


class NVMLError(Exception):
    """As NVML's."""


class Nvml:
    """Two GPUs, until `is_lost`."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.is_lost = False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._read((80, 40)[handle]))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=self._read((1000, 500)[handle]))

    def _read(self, value: int) -> int:
        if self.is_lost:
            raise NVMLError("GPU is lost")
        return value


def test_gpus_are_read_and_a_lost_one_is_no_data() -> None:
    nvml = Nvml()
    reader = GpuReader(nvml, (0, 1))
    assert reader.utilization() == pytest.approx(0.6)
    assert reader.memory_bytes() == 1500
    nvml.is_lost = True
    assert reader.utilization() is None
    assert reader.memory_bytes() is None
    with pytest.raises(NVMLError):
        GpuReader(nvml, (2,))


def test_without_a_model_on_a_gpu_nothing_is_looked_for() -> None:
    assert (
        find_gpus([ModelConfig(id="a", backend="fake"), ModelConfig(id="b", engine=EngineConfig())]) is None
    )


def test_memory_beside_the_parts() -> None:
    parts = {"target_weights": 400, "target_kv": 300}
    assert memory_by_part([parts], 900, 1500) == parts | {"other": 800}
    assert memory_by_part([parts | {"other": 50}], 900, None) == parts | {"other": 50}
    assert memory_by_part([parts], 900, None)["other"] == 500  # of the CPU's KV cache, what is touched
    assert "other" not in memory_by_part([parts], None, None)
