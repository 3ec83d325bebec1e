"""Grammars compiled once per model and kept; each sequence gets a copy of its own.

The grammar library is llguidance: it compiles lazily (well under a millisecond, whatever the
schema), gives a mask in tens of microseconds, takes tokens back, and copies share what was
learnt of a grammar's lexer. It depends on nothing.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.errors import RequestRefused
from engine.grammar.schema_faults import find_fault, in_one_line
from engine.grammar.state import GrammarState
from engine.types import GrammarSpec

if TYPE_CHECKING:
    import llguidance

MAX_CACHED = 128
"""Compiled grammars kept, the least recently used going first; most take some tens of kilobytes."""

_MAX_LEXER_STATES = 50_000  # of one grammar; usual ones have some hundreds
_MAX_ITEMS = 10_000  # of the parser at one place: schemas of a thousand optional properties pass

_JSON_OPTIONS = {
    # A line break with indentation, or a space: pretty and compact JSON both fit, and no model can
    # go on with white space for ever.
    "whitespace_pattern": r"(\n[ \t]{0,32}| )?",
}

TokenizerSource = Callable[[], str]
"""Gives the model's tokenizer in the format of tokenizer.json. Raises `RequestRefused` if it has none."""


class GrammarCompiler:
    """The grammars of one model. May be used from several threads.

    The token table is made with the first grammar, or by `load`; for a large vocabulary that takes
    some tenths of a second.
    """

    def __init__(
        self,
        tokenizer: TokenizerSource,
        vocab_size: int,
        end_ids: frozenset[int],
        max_cached: int = MAX_CACHED,
        max_lexer_states: int = _MAX_LEXER_STATES,
    ) -> None:
        """`vocab_size` is that of the logits; `end_ids` are the tokens that end a sequence. An answer
        whose pattern needs more lexer states than given ends with an error."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._max_cached = max_cached
        import llguidance  # here, not above: who serves no grammar need not have it

        self._limits = llguidance.LLParserLimits(
            max_items_in_row=_MAX_ITEMS, max_lexer_states=max_lexer_states, verbose_errors=False
        )
        self._tokens: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._cached: OrderedDict[GrammarSpec, llguidance.LLMatcher] = OrderedDict()

    def load(self) -> None:
        """Make the token table now. Raises RequestRefused for a model that cannot be held to grammars."""
        self._table()

    def has(self, spec: GrammarSpec) -> bool:
        """True while `start` needs no compilation."""
        return spec in self._cached

    def compile(self, spec: GrammarSpec) -> None:
        """Compile and keep. Raises RequestRefused saying which part of `spec` is at fault, and why."""
        self._find(spec)

    def start(self, spec: GrammarSpec) -> GrammarState:
        """A state at the grammar's start, compiled if it must be. Raises RequestRefused as `compile`."""
        return GrammarState(self._find(spec).deep_copy(), self._end_ids)

    def _find(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        with self._lock:
            if spec in self._cached:
                self._cached.move_to_end(spec)
                return self._cached[spec]
        matcher = self._compile(spec)  # without the lock: what is there already can be had meanwhile
        with self._lock:
            self._cached[spec] = matcher
            self._cached.move_to_end(spec)
            if len(self._cached) > self._max_cached:
                self._cached.popitem(last=False)
        return matcher

    def _table(self) -> llguidance.LLTokenizer:
        with self._table_lock:
            if self._tokens is None:
                self._tokens = self._make_table()
            return self._tokens

    def _make_table(self) -> llguidance.LLTokenizer:
        if not self._end_ids:
            raise RequestRefused("this model has no end token, without which no format can end", "model")
        text = self._tokenizer()
        size = max(self._vocab_size, _num_tokens(json.loads(text)))
        import llguidance  # here, not above: who serves no grammar need not have it

        try:
            return llguidance.LLTokenizer(text, n_vocab=size, eos_token=sorted(self._end_ids))
        except ValueError as error:
            raise RequestRefused(
                f"no format can be kept with the tokenizer of this model: {error}", "model"
            ) from error

    def _compile(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        schemas = [_schema(source.text) for source in spec.schemas]
        parts: list[dict[str, Any]] = [{"name": "main", "lark_grammar": spec.lark}]
        parts += [{"name": f"schema_{i}", "json_schema": schema} for i, schema in enumerate(schemas)]
        import llguidance  # here, not above: who serves no grammar need not have it

        matcher = llguidance.LLMatcher(
            self._table(), json.dumps({"grammars": parts}), log_level=0, limits=self._limits
        )
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()  # now, not within a step; copies share what it finds out
            if not first.is_error():
                return matcher
            matcher = first
        for source, schema in zip(spec.schemas, schemas, strict=True):
            if fault := find_fault(schema, _check_schema):
                path, message = fault
                raise RequestRefused(f"{source.param}{path}: {message}", source.param)
        raise RequestRefused(
            f"{spec.param}: {in_one_line(matcher.get_error()).removesuffix(' <non-verbose/>')}", spec.param
        )


def _schema(text: str) -> Any:
    """The schema with this project's options in place of any that came with it."""
    schema = json.loads(text)
    return schema | {"x-guidance": _JSON_OPTIONS} if isinstance(schema, dict) else schema


def _check_schema(schema: Any) -> str | None:
    """What is wrong with one schema by itself, or None."""
    import llguidance  # here, not above: who serves no grammar need not have it

    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    message = llguidance.LLMatcher.validate_grammar(grammar)
    return message or None


def _num_tokens(table: dict[str, Any]) -> int:
    """One more than the largest token id of a tokenizer.json."""
    vocab = table.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    ids += [token["id"] for token in table.get("added_tokens", ())]
    return 1 + max(ids, default=-1)
