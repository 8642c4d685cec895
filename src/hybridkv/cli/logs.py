"""The daemon's log: where it goes, from which level on, as text or as one JSON object a line."""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

from hybridkv.core.daemon_settings import DaemonSettings, LogFormat
from hybridkv.core.errors import ConfigError
from hybridkv.daemon.filesystem import make_private_directory

_TEXT = "%(asctime)s %(name)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and a traceback, if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": when,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def start_log(settings: DaemonSettings, log_file: str | None, socket_path: Path) -> str | None:
    """Begin to log to a file. "auto" is a file beside the socket, and None is standard error.

    Returns the path of the file. Raises ConfigError where it cannot be written.
    """
    if log_file == "auto":
        make_private_directory(socket_path.parent, "socket")
        log_file = str(socket_path.with_suffix(".log"))
    try:
        logging.basicConfig(level=settings.log_level.upper(), filename=log_file, format=_TEXT)
    except OSError as error:
        what = f"log-file: {log_file} cannot be written ({error.strerror})"
        raise ConfigError(what, "a file in a directory of yours works") from error
    if settings.log_format is LogFormat.JSON:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    return log_file
