"""A tier for the daemon's core: a dictionary that fails on demand."""

from collections.abc import Iterator, Sequence

from hybridkv.tiers.contract import (
    START_BYTES,
    MissingError,
    ReadRequest,
    RecordStart,
    Tier,
    TierError,
    WriteRequest,
)


class DictTier(Tier):
    """Records in a dictionary. While `ill` is set, each call fails with that error."""

    name = "sim"

    def __init__(self, records: dict[bytes, bytes], is_remote: bool) -> None:
        self.records = records
        self.is_remote = is_remote
        self.ill: type[TierError] | None = None

    def open(self) -> None:
        self._call()

    def peek(self, key: bytes) -> bool | None:
        return None if self.is_remote else key in self.records

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        self._call()
        return [key in self.records for key in keys]

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        return [self._get(item) for item in items]

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        self._call()
        records = (self.records.get(key) for key in keys)
        return [
            MissingError("it is not there")
            if image is None
            else RecordStart(image[:START_BYTES], len(image))
            for image in records
        ]

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        return [self._put(item) for item in items]

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        self._call()
        for key in keys:
            self.records.pop(key, None)

    def keys(self) -> Iterator[bytes]:
        yield from list(self.records)

    def tend(self) -> None:
        self._call()

    def close(self) -> None:
        """Nothing to let go of."""

    def _call(self) -> None:
        if self.ill is not None:
            raise self.ill("Input/output error")

    def _get(self, item: ReadRequest) -> TierError | None:
        image = self.records.get(item.key)
        if image is None:
            return MissingError("it is not there")
        image = image.ljust(sum(map(len, item.pieces)), b"\0")
        for piece in item.pieces:
            piece[:], image = image[: len(piece)], image[len(piece) :]
            if self.ill is not None:
                return self.ill("Input/output error")
        return None

    def _put(self, item: WriteRequest) -> TierError | None:
        if self.ill is not None:
            return self.ill("Input/output error")
        self.records[item.key] = b"".join(item.pieces)
        return None
