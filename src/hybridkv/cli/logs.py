"""The daemon's log: where it goes, from which level on, as text or as one JSON object a line."""

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

from hybridkv.core.daemon_settings import DaemonSettings, LogFormat
from hybridkv.core.errors import ConfigError
from hybridkv.daemon.filesystem import make_private_directory

logger = logging.getLogger("hybridkv.daemon")

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


def has_terminal() -> bool:
    """Returns whether this process has a terminal that can close. A service has none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Hangup:
    """What SIGHUP does: the log file is opened anew, unless it says that the terminal closed.

    Programs that rotate logs, and a service's reload, send the signal too.
    """

    def __init__(
        self, log_file: str | None, has_own_stderr: bool, ends_with_terminal: bool
    ) -> None:
        """`has_own_stderr`: standard error is the log file too.

        `ends_with_terminal`: the daemon has a terminal, and ends when that is closed.
        """
        self._log_file = log_file
        self._has_own_stderr = has_own_stderr
        self._ends_with_terminal = ends_with_terminal

    def on_hangup(self) -> bool:
        """Open the log file anew. Returns False where the daemon ends, because of its terminal."""
        if self._ends_with_terminal and not has_terminal():
            logger.warning("the terminal was closed: the daemon ends and keeps the cache in memory")
            return False
        if self._log_file is None:
            logger.info("SIGHUP: there is no log file that could be opened anew; serving goes on")
            return True
        try:
            self._reopen(self._log_file)
        except OSError as error:
            text = "SIGHUP: %s cannot be opened anew (%s); the log goes on in the old file"
            logger.warning(text, self._log_file, error.strerror)
        else:
            logger.info("SIGHUP: the log file was opened anew")
        return True

    def _reopen(self, path: str) -> None:
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # the handler closes it
        if self._has_own_stderr:
            os.dup2(file.fileno(), 2)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.FileHandler):
                old = handler.setStream(file)
                if old is not None:
                    old.close()
