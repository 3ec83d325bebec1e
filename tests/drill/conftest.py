"""What drills share: a server, and a note of how long it took to recover."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.drill.drill import Drill, drilled

RECOVERIES: pytest.StashKey[list[str]] = pytest.StashKey()


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    with drilled(tmp_path_factory.mktemp("drill")) as server:
        yield server


@pytest.fixture
def recovered(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """To be told how long it took from a fault to the first answer to a request begun after it."""

    def tell(what: str, seconds: float) -> None:
        request.config.stash.setdefault(RECOVERIES, []).append(f"{what}: {seconds:.2f} s")

    return tell


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The times to recover, as they were measured."""
    if lines := terminalreporter.config.stash.get(RECOVERIES, []):
        terminalreporter.section("from fault to the first answer to a request begun after it")
        for line in lines:
            terminalreporter.write_line(line)
