"""The key of a tier: records are encrypted by AES-256-GCM, and bound to their names.

A body is encrypted after it was compressed::

    |nonce, 12 random bytes |ciphertext |tag, 16 bytes

The record's header, with its name, is the associated data: a body under another header cannot be
decrypted.
"""

import hashlib
import importlib
import os
import stat
from types import ModuleType

from hybridkv.core.errors import ConfigError
from hybridkv.tiers.contract import DamagedError

KEY_BYTES = 32
NONCE_BYTES = 12
ADDED_BYTES = NONCE_BYTES + 16  # What encryption adds to the bytes of a body.
_OTHERS = stat.S_IWGRP | stat.S_IRWXO


def _find_library() -> ModuleType | None:
    try:
        return importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
    except ImportError:
        return None


library = _find_library()


def associated_data(header: bytes) -> bytes:
    """Returns what a body is bound to: the whole header, with name, shape and tenant."""
    return header


class TierKey:
    """A secret of KEY_BYTES that encrypts and decrypts."""

    def __init__(self, secret: bytes) -> None:
        assert library is not None, "read_key has found the library"
        self._cipher = library.AESGCM(secret)
        self._invalid_tag: type[Exception] = importlib.import_module(
            "cryptography.exceptions"
        ).InvalidTag
        digest = hashlib.sha256(b"hybridkv: the id of a tier's key" + secret).digest()
        self.id = int.from_bytes(digest[:4], "little")
        """Distinguishes keys, and reveals nothing of the secret."""

    def encrypt(self, content: bytes, header: bytes) -> bytes:
        """Returns the encrypted body of a record with this header."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + bytes(self._cipher.encrypt(nonce, content, associated_data(header)))

    def decrypt(self, body: memoryview, header: bytes) -> bytes:
        """Returns the content of a body. Raises DamagedError where body or header were changed."""
        if len(body) < ADDED_BYTES:
            raise DamagedError("its encrypted bytes end too early")
        try:
            bound = associated_data(header)
            return bytes(self._cipher.decrypt(body[:NONCE_BYTES], body[NONCE_BYTES:], bound))
        except self._invalid_tag as error:
            raise DamagedError("its encrypted bytes are not those that were written") from error


def read_key(path: str, where: str) -> TierKey:
    """Returns the key in a file. Raises ConfigError where it is no key, or others may read it."""
    if library is None:
        what = f"{where}: key= needs the package cryptography"
        raise ConfigError(what, "pip install 'hybridkv[encryption]' works")
    try:
        with open(path, "rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(KEY_BYTES + 1)
    except OSError as error:
        what = f"{where}: the key file {path} cannot be read ({error.strerror})"
        raise ConfigError(what, "a file that this user may read works") from error
    if mode & _OTHERS:
        what = f"{where}: the key file {path} is open to others (mode {stat.S_IMODE(mode):04o})"
        raise ConfigError(what, f"chmod 600 {path} works")
    if len(secret) != KEY_BYTES:
        what = f"{where}: the key file {path} has not just {KEY_BYTES} bytes"
        raise ConfigError(what, f"openssl rand -out {path} {KEY_BYTES} works")
    return TierKey(secret)
