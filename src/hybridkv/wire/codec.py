"""Frames on a byte stream: a little-endian u32 length, and that many bytes of msgpack."""

import contextlib
import struct

import msgspec

from hybridkv.core.errors import HybridKVError
from hybridkv.wire.messages import MESSAGE_BYTES_MAX as BYTES_MAX
from hybridkv.wire.messages import PROTOCOL_VERSION, Greeting, Hello, Reply, Request

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_greetings = msgspec.msgpack.Decoder(Greeting)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class WireError(HybridKVError):
    """The bytes are not a message of this protocol, and the connection cannot go on."""


def encode(message: Request | Reply) -> bytes:
    """Return a message as one frame. Raises WireError where it is over the limit."""
    out = bytearray()
    append(out, message)
    return bytes(out)


def append(out: bytearray, message: Request | Reply) -> None:
    """Append a message to `out` as one frame, without a copy.

    Raises WireError where it is over the limit, and leaves `out` as it was.
    """
    start = len(out)
    body = start + _LENGTH.size
    out += bytes(_LENGTH.size)
    try:
        _encoder.encode_into(message, out, body)
        size = len(out) - body
        if size > BYTES_MAX:
            raise WireError(f"a message of {size} bytes is over the limit of {BYTES_MAX}")
    except BaseException:
        del out[start:]
        raise
    _LENGTH.pack_into(out, start, size)


def decode_request(body: bytes) -> Request:
    """Return the request in a frame's body. Raises WireError.

    The hello of another protocol version becomes a Hello with that version, to be refused.
    """
    try:
        return _requests.decode(body)
    except _UNREADABLE as error:
        with contextlib.suppress(*_UNREADABLE):
            # The bytes are no greeting of another version either.
            greeting = _greetings.decode(body)
            if greeting.version != PROTOCOL_VERSION:
                return Hello(greeting.id, greeting.version, "control")
        raise WireError(f"not a request: {error}") from error


def decode_reply(body: bytes) -> Reply:
    """Return the reply in a frame's body. Raises WireError."""
    try:
        return _replies.decode(body)
    except _UNREADABLE as error:
        raise WireError(f"not a reply: {error}") from error


class Frames:
    """Cuts received bytes into the bodies of frames, and holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes | memoryview) -> list[bytes]:
        """Return the bodies that `received` completes. Raises WireError on one over the limit."""
        if self._buffer:
            self._buffer += received
        bodies: list[bytes] = []
        at = 0
        with memoryview(self._buffer or received) as data:
            while len(data) - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(data, at)
                if size > BYTES_MAX:
                    raise WireError(f"a frame of {size} bytes is over the limit of {BYTES_MAX}")
                start = at + _LENGTH.size
                if len(data) - start < size:
                    break
                at = start + size
                bodies.append(data[start:at].tobytes())
        if self._buffer:
            del self._buffer[:at]
        else:
            self._buffer += received[at:]
        return bodies
