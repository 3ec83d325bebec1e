"""Do two models mean the same by a token id?"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import DrafterMismatch

_NUM_EXAMPLES = 3


def require_same_tokens(
    draft_name: str, draft: Mapping[str, int], target_name: str, target: Mapping[str, int]
) -> None:
    """Raise `DrafterMismatch` unless both tokenizers give every token (text -> id) the same id."""
    if draft == target:
        return
    differing = sorted(draft.items() ^ target.items(), key=lambda item: (item[1], item[0]))
    examples = ", ".join(f"{text!r} ({token_id})" for text, token_id in differing[:_NUM_EXAMPLES])
    raise DrafterMismatch(
        f"the draft model {draft_name!r} and the target {target_name!r} have different tokens, "
        f"e.g. {examples}; a draft model must share the target's tokenizer"
    )
