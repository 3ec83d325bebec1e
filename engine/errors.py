"""Errors the engine raises towards whoever drives it.

EngineError
├── RequestRefused        the request can never run here (too long, bad token id); raised by `Engine.add`
├── ModelSourceError      a model could not be found, read, or is of an unsupported kind
├── DrafterMismatch       a drafter does not fit the target (vocabulary, architecture)
├── InvalidLogits         the target produced NaN or infinity, or a request masks every token
└── IntegrityError        block accounting is broken: a bug in the engine, never the caller's fault

A drafter that fails is not an error of the engine: the step goes on without its draft and
`StepRecord.drafter_errors` counts it.
"""


class EngineError(Exception):
    """Base of everything raised on purpose in `engine`."""


class RequestRefused(EngineError):
    """The request can never be served by this engine. `param` names the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ModelSourceError(EngineError):
    """A model source is missing or unreadable. The message is one sentence saying what to do."""


class DrafterMismatch(EngineError):
    """A drafter cannot serve this target, e.g. its vocabulary differs."""


class InvalidLogits(EngineError):
    """No token can be chosen from a row of logits. `sequence_index` says whose row, where known."""

    def __init__(self, message: str, sequence_index: int | None = None) -> None:
        super().__init__(message)
        self.sequence_index = sequence_index


class IntegrityError(EngineError):
    """Reference counts or block tables disagree."""
