"""Utilisation and memory of the GPUs that models run on, by NVML (optional package `nvidia-ml-py`)."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from specgate.config import ModelConfig

logger = logging.getLogger(__name__)


class GpuReader:
    """Of some GPUs. A reading that fails is None: the driver may be gone while we are not."""

    def __init__(self, nvml: Any, indices: Sequence[int]) -> None:
        """`nvml` is the module `pynvml`. Raises its NVMLError where there is no driver or no such GPU."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in indices]

    def utilization(self) -> float | None:
        """Mean over the GPUs of the share of time in which a kernel ran, over the driver's last sample."""
        try:
            rates = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
        except self._nvml.NVMLError:
            return None
        return float(sum(rates)) / len(rates) / 100

    def memory_bytes(self) -> int | None:
        """Used on these GPUs, whoever uses it."""
        try:
            return sum(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)
        except self._nvml.NVMLError:
            return None


def find_gpus(models: Iterable[ModelConfig]) -> GpuReader | None:
    """A reader for the GPUs that the models are configured for; None where there are none, or no NVML."""
    devices = {m.engine.device for m in models if m.engine is not None and m.engine.device != "cpu"}
    if not devices:
        return None
    indices = sorted({int((re.search(r"\d+$", device) or ["0"])[0]) for device in devices})
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        logger.warning("GPU utilisation is not shown: pip install 'specgate-gateway[gpu]' for nvidia-ml-py")
        return None
    try:
        return GpuReader(nvml, indices)
    except nvml.NVMLError as error:
        logger.warning("GPU utilisation is not shown: %s", error)
        return None
