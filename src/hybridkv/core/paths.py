"""Paths of sockets and names of nodes: their defaults, and whether they can be used. No I/O."""

from hybridkv.core.errors import ConfigError

_NODE_NAME_MAX = 200  # Bytes in a node's name, which begins names of directories and files.
_SOCKET_PATH_MAX = 107  # Bytes that the kernel allows in the path of a Unix socket.


def default_socket(runtime: str, uid: int) -> str:
    """Returns the socket of a user's own daemon. `runtime` is the runtime directory or "".

    "/run/user/1000" -> "/run/user/1000/hybridkv/daemon.sock"
    "" -> "/tmp/hybridkv-1000/daemon.sock"
    """
    base = f"{runtime}/hybridkv" if runtime.startswith("/") else f"/tmp/hybridkv-{uid}"
    return f"{base}/daemon.sock"


def socket_of_server(server: str, runtime: str, uid: int, node: int = 0) -> str:
    """Returns the socket path of a `server` setting on a node of an engine.

    The setting is "auto" or "unix:///path". "{node}" in a path is the node's number.
    """
    if server == "auto":
        return check_socket_path(default_socket(runtime, uid), "server")
    path = server.removeprefix("unix://").replace("{node}", str(node))
    return check_socket_path(path, "server")


def check_socket_path(path: str, setting: str) -> str:
    """Returns `path`. Raises ConfigError where no Unix socket can have it."""
    is_named = path.startswith("/") and path.rpartition("/")[2] not in ("", ".", "..")
    if not is_named or not is_writable(path, _SOCKET_PATH_MAX):
        absolute = f"must be the absolute path of a file, of at most {_SOCKET_PATH_MAX} bytes"
        raise ConfigError(f"{setting}: {path!r} {absolute}", value="/tmp/hybridkv/daemon.sock")
    return path


def check_node_name(name: str) -> str:
    """Returns `name`. Raises ConfigError where no directory can have it."""
    if name in ("", ".", "..") or "/" in name or not is_writable(name, _NODE_NAME_MAX):
        plain = f'must be one plain name of 1 to {_NODE_NAME_MAX} bytes, without "/"'
        raise ConfigError(f"node={name!r} {plain}", value="gpu7")
    return name


def is_writable(text: str, bytes_max: int | None = None) -> bool:
    """Returns whether `text` is UTF-8 without NUL. Words of a command line may be neither."""
    is_text = "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)
    return is_text and (bytes_max is None or len(text.encode()) <= bytes_max)
