"""Media of prompts: what stands for their content in the names of chunks.

vLLM names an image, a sound or a video by its *identifier*: a hash of its content, a label that the
client chose (`multi_modal_uuids`), a hash over such a label, an image's own EXIF label, or, with
both of its caches off, a counter of its process. Their form does not tell which. So the names of
the chunks from a medium on also cover the values that the model's encoder is given for it::

    the scheduler has the values           blake3 over them joins the names
    it does not have them                  the request is only computed
    the identifier named others before     the same: vLLM's own caches may hold what those gave
    vLLM names media by a counter          the same: no other request has these names
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from blake3 import blake3

from hybridkv.core.keys import HASH_BYTES, exclusive_or

MEDIA_MAX = 1 << 17
"""Identifiers whose content is remembered, of some 200 bytes each. Media with further ones are only
computed, until the engine is restarted."""


def media_refusal(vllm_config: Any) -> str:
    """Return why no media of an engine have names, as `hybridkv explain` prints it, or nothing."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        return ""
    if vllm_config.ec_transfer_config is not None:
        return "outputs of another engine's encoder are found by labels (--ec-transfer-config)"
    is_cached = vllm_config.cache_config.enable_prefix_caching
    if not is_cached and not multimodal.mm_processor_cache_gb:
        return (
            "vLLM does not hash media while its prefix cache and its processor cache are off; "
            "--enable-prefix-caching or --mm-processor-cache-gb 4 works"
        )
    return ""


class MediaContents:
    """The content that each identifier of one engine names. It outlives the engine's caches."""

    def __init__(self, refusal: str = "") -> None:
        """`refusal` is that of `media_refusal`."""
        self._refusal = refusal
        self._contents: dict[int, bytes] = {}
        """The digest by the identifier's hash. Empty = the identifier named several contents."""

    def content_digest(self, feature: Any) -> bytes:
        """Return HASH_BYTES for the content of one of vLLM's MultiModalFeatureSpec.

        Empty where it is not known, or where vLLM's own caches may hold what another gave.
        """
        if self._refusal:
            return b""
        digest = digest_media(feature)
        number = hash(feature.identifier)
        known = self._contents.get(number)
        if known is None:
            if len(self._contents) >= MEDIA_MAX:
                return b""
            self._contents[number] = digest
        elif known != digest:
            self._contents[number] = digest = b""
        return digest

    def on_untracked_request(self, request: Any) -> None:
        """Take the media of a request that is only computed: the engine's caches get them too."""
        for feature in getattr(request, "mm_features", ()):
            self.content_digest(feature)
        # A fallback calls this, and must not raise.
        if getattr(request, "resumable", True):
            # Nobody sees the media of its later turns.
            self._refusal = "a session that was not followed may have named any media; a restart "
            self._refusal += "ends that"

    def refusal_of(self, feature: Any) -> str:
        """Return why a medium has no content that names it, as `hybridkv explain` prints it."""
        if self._refusal:
            return self._refusal
        if not digest_media(feature):
            return (
                "the scheduler does not have the values of the prompt's media; "
                "--mm-processor-cache-type lru works"
            )
        if hash(feature.identifier) in self._contents:
            return "the identifier of a medium (multi_modal_uuids) named another content before"
        return f"the engine has had {MEDIA_MAX} other media; a restart ends that"


class RequestMedia:
    """The media of one request, in the order of their places. A session's later turns add some."""

    def __init__(self, request: Any, contents: MediaContents) -> None:
        self._request = request
        self._contents = contents
        self._starts: list[int] = []  # The place of each medium's first token.
        self._covers: list[bytes] = []  # HASH_BYTES that cover each medium and those before it.
        self.unknown: Any = None  # The first medium whose content is not known.

    def is_known(self) -> bool:
        """Return True if the content of every medium that the request has now is known."""
        for feature in self._request.mm_features[len(self._starts) :]:
            digest = self._contents.content_digest(feature)
            before = self._covers[-1] if self._covers else b""
            if not digest and self.unknown is None:
                self.unknown = feature
            self._starts.append(feature.mm_position.offset)
            # Random bytes name nothing: no lookup finds them.
            cover = blake3(before + digest).digest() if digest else secrets.token_bytes(HASH_BYTES)
            self._covers.append(cover)
        return self.unknown is None

    def why_unknown(self) -> str:
        """Return why the request is only computed. Only where `is_known` is False."""
        return self._contents.refusal_of(self.unknown)

    def cover_hashes(self, hashes: bytes, ends: Sequence[int]) -> bytes:
        """Return hashes that also cover the media that begin before each of `ends`, by XOR."""
        self.is_known()
        covers = [self._cover(end) for end in ends]
        return exclusive_or(hashes, b"".join(covers))

    def _cover(self, end: int) -> bytes:
        begun = sum(start < end for start in self._starts)
        return self._covers[begun - 1] if begun else bytes(HASH_BYTES)


def digest_media(feature: Any) -> bytes:
    """Return HASH_BYTES over the values that the encoder is given for a medium. Empty = unknown.

    The scheduler has no values where these lie in memory that API servers and workers share
    (`mm_processor_cache_type` "shm"): there it has numbers that say where.
    """
    if not feature.data:
        return b""
    digest = blake3(repr((feature.modality, len(feature.data))).encode())
    try:
        values = {name: element.data for name, element in feature.data.items()}
        values["is_embed"] = feature.mm_position.is_embed
        for name in sorted(values):
            digest.update(repr(name).encode())
            for part in _parts(values[name], is_optional=name == "is_embed"):
                digest.update(part)
    except Exception:  # noqa: BLE001  # They are any model's values; `explain` says it.
        return b""
    return digest.digest()


def _parts(value: object, *, is_optional: bool = False) -> Iterator[Any]:
    """Yield what stands for a tensor or for nested lists of tensors, each with its size before it.

    Raises TypeError for any other value.
    """
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{[*value.shape]}".encode()
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}]".encode()
        for item in value:
            yield from _parts(item)
    elif is_optional and value is None:
        yield b"-"
    else:
        raise TypeError(f"a value of type {type(value).__name__}")
