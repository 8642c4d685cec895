"""Where a user's daemon listens: pure text, the user's directory is an argument."""

from hybridkv.core.errors import ConfigError

_NODE_NAME_MAX = 200  # Bytes in a node's name, which begins names of directories and files.
_SOCKET_PATH_MAX = 107  # Bytes that the kernel allows in the path of a Unix socket.


def default_socket(runtime: str, uid: int) -> str:
    """The socket of a user's own daemon; `runtime` is the runtime directory, empty for none."""
    base = f"{runtime}/hybridkv" if runtime.startswith("/") else f"/tmp/hybridkv-{uid}"
    return f"{base}/daemon.sock"


def socket_of_server(server: str, runtime: str, uid: int) -> str:
    """The socket path of a `server` setting ("auto" or "unix:///path")."""
    path = default_socket(runtime, uid) if server == "auto" else server.removeprefix("unix://")
    return check_socket_path(path, "server")


def check_socket_path(path: str, setting: str) -> str:
    """`path`, unless no Unix socket can have it; raises ConfigError."""
    is_named = path.startswith("/") and path.rpartition("/")[2] not in ("", ".", "..")
    if not is_named or not is_writable(path, _SOCKET_PATH_MAX):
        absolute = f"must be the absolute path of a file, of at most {_SOCKET_PATH_MAX} bytes"
        raise ConfigError(f"{setting}: {path!r} {absolute}", '"/tmp/hybridkv/daemon.sock" works')
    return path


def check_node_name(name: str) -> str:
    """`name`, unless no directory can have it; raises ConfigError."""
    if name in ("", ".", "..") or "/" in name or not is_writable(name, _NODE_NAME_MAX):
        plain = f'must be one plain name of 1 to {_NODE_NAME_MAX} bytes, without "/"'
        raise ConfigError(f"node={name!r} {plain}", '"gpu7" works')
    return name


def is_writable(text: str, bytes_max: int | None = None) -> bool:
    """Whether `text` has no NUL and is UTF-8, which not all words of a command line are."""
    is_text = "\0" not in text and not any("\ud800" <= one <= "\udfff" for one in text)
    return is_text and (bytes_max is None or len(text.encode()) <= bytes_max)
