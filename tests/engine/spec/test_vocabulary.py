"""A drafter whose tokens differ from the target's is refused with an example."""

from __future__ import annotations

import pytest

from engine.errors import DrafterMismatch
from engine.spec.vocabulary import require_same_tokens


def test_equal_tokens_pass() -> None:
    require_same_tokens("small", {"a": 0, "b": 1}, "large", {"b": 1, "a": 0})


@pytest.mark.parametrize("draft", [{"a": 0, "b": 2}, {"a": 0}, {"a": 0, "b": 1, "c": 2}])
def test_any_difference_is_refused_with_an_example(draft: dict[str, int]) -> None:
    with pytest.raises(DrafterMismatch, match=r"'small'.*'large'.*'[bc]' \(\d\)"):
        require_same_tokens("small", draft, "large", {"a": 0, "b": 1})
