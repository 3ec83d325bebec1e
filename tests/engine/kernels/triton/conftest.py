"""Where there is no GPU, Triton interprets the kernels on CPU tensors."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

HAS_TRITON = find_spec("triton") is not None
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported

collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """numpy's remarks on infinities, wrapping words and old habits are of the interpreter's making.

    That of Triton 3.6 needs numpy below 2.4.
    """
    for item in items:
        if "kernels/triton" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0"))


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
