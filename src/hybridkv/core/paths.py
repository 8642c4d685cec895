"""Where a user's daemon listens: pure text, the environment is an argument."""

from collections.abc import Mapping

from hybridkv.core.errors import ConfigError

_SOCKET_PATH_MAX = 107
"""Bytes that the kernel allows in the path of a Unix socket."""


def default_socket(environ: Mapping[str, str], uid: int) -> str:
    """The socket of a user's own daemon."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    base = f"{runtime}/hybridkv" if runtime.startswith("/") else f"/tmp/hybridkv-{uid}"
    return f"{base}/daemon.sock"


def socket_of_server(server: str, environ: Mapping[str, str], uid: int) -> str:
    """The socket path of a `server` setting ("auto" or "unix:///path")."""
    path = default_socket(environ, uid) if server == "auto" else server.removeprefix("unix://")
    return check_socket_path(path, "server")


def check_socket_path(path: str, setting: str) -> str:
    """`path`, unless no Unix socket can have it; raises ConfigError."""
    if not path.startswith("/") or len(path.encode()) > _SOCKET_PATH_MAX:
        raise ConfigError(
            f"{setting}: {path!r} must be an absolute path of at most {_SOCKET_PATH_MAX} bytes; "
            '"/tmp/hybridkv/daemon.sock" works'
        )
    return path
