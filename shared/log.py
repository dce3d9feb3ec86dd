"""Structured logs: every line carries the request id of the work that wrote it."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

from shared.config import LogSettings

#: stands for the id outside any request
NO_REQUEST = "-"
#: id of the request that the current task works for
request_id: ContextVar[str] = ContextVar("request_id", default=NO_REQUEST)

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id"}


class _RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line; fields given by ``extra=`` stand beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line of JSON."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", "-"),
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """For people: time, level, request id, message and extra fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(request_id)s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line of text."""
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        fields = " ".join(f"{name}={value}" for name, value in extra.items())
        line = super().format(record)
        return f"{line} {fields}" if fields else line


def configure(settings: LogSettings) -> None:
    """Sets up the loggers of this project on standard error; other libraries keep theirs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RequestIdFilter())
    handler.setFormatter(JsonFormatter() if settings.json_lines else TextFormatter())
    for name in ("encoder_service", "llm_service", "shared", "lookonce"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(settings.level.upper())
        logger.propagate = False
