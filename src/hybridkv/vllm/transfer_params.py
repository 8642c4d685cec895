"""What a client asks of the cache in a request's `kv_transfer_params`.

Routers put keys there for connectors that pass KV from one engine to another. They are passed over.
Keys that begin with "hybridkv." are for this connector.
"""

from typing import Any, NamedTuple

PREFIX = "hybridkv."
READ, WRITE = f"{PREFIX}read", f"{PREFIX}write"


class CacheWishes(NamedTuple):
    """What a request may do with the cache."""

    reads: bool = True
    writes: bool = True
    mistake: str = ""  # A sentence about a key or a value that says nothing, or nothing.

    @property
    def why_unread(self) -> str:
        """Why nothing is loaded. Empty = it may be."""
        return "" if self.reads else f"it asks not to load anything ({READ} in kv_transfer_params)"


def cache_wishes(request: Any) -> CacheWishes:
    """Return what a request asks for. A value that is neither true nor false is taken for false.

    >>> params = {"do_remote_decode": True, "hybridkv.write": False}
    >>> cache_wishes(SimpleNamespace(kv_transfer_params=params))
    CacheWishes(reads=True, writes=False, mistake='')
    """
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, dict):
        return CacheWishes()
    own = {key: params[key] for key in params if str(key).startswith(PREFIX)}
    mistakes = (
        f"{key} is {value!r:.40}, and is taken for false: true and false work"
        if key in (READ, WRITE)
        else f"{key:.40} is no key: {READ} and {WRITE} work"
        for key, value in own.items()
        if key not in (READ, WRITE) or not isinstance(value, bool)
    )
    return CacheWishes(
        reads=own.get(READ, True) is True,
        writes=own.get(WRITE, True) is True,
        mistake=next(mistakes, ""),
    )
