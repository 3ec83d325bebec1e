"""Requests to token ids: template, tokenizer, and the check that it fits. Torch-free.

A special token's name within a message is read as that token, as vLLM and transformers do: prompts
are the same ids everywhere, and a caller may write turns by hand. So whoever passes on text of
strangers must take such names out of it first, or a stranger can end his turn and begin another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from engine.errors import ModelSourceError
from engine.models.source import resolve
from engine.models.tokenizer import load_tokenizer
from engine.models.tokenizer_settings import load_tokenizer_settings
from specgate.backends.embedded.answer_grammar import answer_grammar, answer_schema
from specgate.backends.embedded.chat_template import ChatTemplate, TemplateFailed
from specgate.backends.embedded.detokenize import TokenBytes
from specgate.backends.embedded.tool_format import GENERIC, ToolFormat, explained, learn_format, shows_tools
from specgate.backends.embedded.tool_reader import ToolReader
from specgate.errors import BadRequest, ContextTooLong, UnsupportedParameter
from specgate.types import GenerationRequest, PreparedPrompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INLINE_CHARS = 2_000  # texts up to here are encoded on the event loop: cheaper than a thread's hand-over


class PromptEncoder:
    """A model's text side: its chat template and tokenizer, shared by all requests."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.table = TokenBytes(tokenizer)
        self._has_own_tools, self._tool_format = _tool_format(template, tokenizer)

    @classmethod
    def load(cls, source: str, wall: Callable[[], float]) -> PromptEncoder:
        """Read the text side of a model source. Raises ModelSourceError."""
        files = resolve(source)
        settings = load_tokenizer_settings(files)
        special = {"bos_token": settings.bos_token or "", "eos_token": settings.eos_token or ""}
        source_text = settings.chat_template
        try:
            template = None if source_text is None else ChatTemplate(source_text, special, wall)
        except TemplateFailed as error:
            raise ModelSourceError(f"{files.folder}: {error}") from error
        return cls(load_tokenizer(files), template)

    async def prepare(
        self, request: GenerationRequest, max_model_len: int, vocab_size: int, executor: Executor
    ) -> PreparedPrompt:
        """The prompt as text and ids. Raises BadRequest naming the field at fault."""
        param = "messages" if request.messages is not None else "prompt"
        if request.messages is not None:
            text = self._render(request)
            ids = await self._encode(text, executor, add_special_tokens=False)
        elif isinstance(request.prompt, str):
            text = request.prompt
            ids = await self._encode(text, executor, add_special_tokens=True)
        else:
            ids = tuple(request.prompt or ())
            _check_ids(ids, vocab_size)
            text = self.table.decode(ids, skip_special_tokens=False)
        if not ids:
            raise BadRequest(f"{param} must hold at least one token", param)
        if len(ids) >= max_model_len:
            raise ContextTooLong(
                f"{param} has {len(ids)} tokens; this model's context is {max_model_len} tokens, of which at"
                " least one is needed for the answer",
                param,
            )
        grammar = answer_grammar(request, self._form_for(request))
        return PreparedPrompt(ids, text, grammar=grammar, first_token=self.table.text_of(ids[0]))

    def tool_reader(self, request: GenerationRequest, salt: str) -> ToolReader | None:
        """For one answer; None if it can hold no tool calls. `salt`: see `ToolReader`."""
        form = self._form_for(request)
        if form is None:
            return None
        is_anchored = form.is_anchored or answer_schema(request.response_format) is not None
        return ToolReader(
            form, salt, is_forced=request.tool_choice.mode == "required", is_anchored=is_anchored
        )

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode on the calling thread, which holds no interpreter lock meanwhile (`encode` would)."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _render(self, request: GenerationRequest) -> str:
        if self._template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", "messages")
        messages: Sequence[Mapping[str, Any]] = request.messages or ()
        tools: Sequence[Mapping[str, Any]] = () if self._form_for(request) is None else request.tools
        if not self._has_own_tools:
            messages, tools = explained(messages, tools), ()
        try:
            return self._template.render(messages, tools, request.chat_template_kwargs)
        except TemplateFailed as error:
            raise BadRequest(str(error), error.param) from error

    def _form_for(self, request: GenerationRequest) -> ToolFormat | None:
        """How the answer would write calls; None if the request offers no tools."""
        if request.tool_choice.mode == "none":
            return None
        if self._tool_format is None:
            raise UnsupportedParameter(
                "'tools': this model's chat template does not write tool calls as JSON objects with a name"
                " and arguments, the only form that can be read.",
                "tools",
            )
        if self._tool_format.is_anchored and answer_schema(request.response_format) is not None:
            raise UnsupportedParameter(
                "'response_format' cannot be combined with 'tools' here: this model writes calls as bare"
                " JSON, so that one could not be told from the other.",
                "response_format",
            )
        return self._tool_format

    async def _encode(self, text: str, executor: Executor, *, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) <= _INLINE_CHARS:
            return tuple(self.tokenize(text, add_special_tokens))
        loop = asyncio.get_running_loop()
        return tuple(await loop.run_in_executor(executor, self.tokenize, text, add_special_tokens))


def _check_ids(ids: tuple[int, ...], vocab_size: int) -> None:
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"prompt[{place}] is {token_id}; token ids of this model are 0 to {vocab_size - 1}", "prompt"
            )


def _tool_format(template: ChatTemplate | None, tokenizer: Tokenizer) -> tuple[bool, ToolFormat | None]:
    """Whether the template shows tools by itself, and the format in which it writes calls, if readable."""
    if template is None:
        return False, None

    def render(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], begins: bool
    ) -> str | None:
        try:
            return template.render(messages, tools, {"add_generation_prompt": begins})
        except TemplateFailed:
            return None

    if not shows_tools(render):
        return False, GENERIC
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    return True, learn_format(render, special)
