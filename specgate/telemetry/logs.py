"""The process's own log: text for people or one JSON object a line. Never a prompt's text."""

from __future__ import annotations

import json
import logging
import sys

from specgate.config import LoggingConfig


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and the trace of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


class TextFormatter(logging.Formatter):
    """One line, control characters escaped, so that no message can forge another line. A trace
    follows on lines that are set in."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(map(_printable, super().format(record).split("\n")))

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _printable(super().formatMessage(record))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def set_up_logging(config: LoggingConfig) -> None:
    """For the process: called once, by whoever runs it."""
    handler = logging.StreamHandler(sys.stderr)
    if config.format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
