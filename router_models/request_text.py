"""From an OpenAI-shaped request to `RequestText`: what was asked, apart from any template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router_models.types import RequestText


def content_text(content: Any) -> str:
    """The text of a message's content: a string, a list of parts, or nothing."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        texts = [p.get("text", "") if isinstance(p, Mapping) else p for p in content]
        return "\n".join(t for t in texts if isinstance(t, str))
    return ""


def from_messages(
    messages: Sequence[Mapping[str, Any]],
    num_tools: int = 0,
    has_response_format: bool = False,
    max_tokens: int | None = None,
) -> RequestText:
    """A chat request. The last user message is the request; what came before it is history."""
    system: list[str] = []
    turns: list[tuple[str, str]] = []
    for message in messages:
        role, text = str(message.get("role", "user")), content_text(message.get("content"))
        if role in ("system", "developer"):
            system.append(text)
        else:
            turns.append((role, text))
    users = [i for i, (role, _) in enumerate(turns) if role == "user"]
    last = users[-1] if users else len(turns) - 1
    return RequestText(
        user=turns[last][1] if turns else "",
        system="\n".join(system),
        history=tuple(text for _, text in turns[: max(last, 0)]),
        num_tools=num_tools,
        has_response_format=has_response_format,
        max_tokens=max_tokens,
    )


def from_prompt(prompt: str, suffix: str | None = None, max_tokens: int | None = None) -> RequestText:
    """A raw completion."""
    return RequestText(user=prompt, is_raw_prompt=True, suffix=suffix or None, max_tokens=max_tokens)
