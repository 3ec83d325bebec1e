"""Fixtures of the kernels' tests."""

from __future__ import annotations

import ctypes

import pytest

from tests.engine.kernels.portable import MACHINES, library_for


@pytest.fixture(scope="session", params=MACHINES)
def portable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as another machine gets them."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # what one worker has compiled is there for all
        folder = folder.parent
    return library_for(request.param, folder)
