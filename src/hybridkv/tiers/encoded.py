"""A tier that encodes the records it writes, and decodes the records it reads.

It reads plain records and records of every codec, so that daemons with and without `codec=` may
share a directory. With `key=` it reads only records that were encrypted with that key.
"""

import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence

from hybridkv.shm.slots import HEADER_BYTES, SLOT_ALIGN
from hybridkv.tiers.coding import Coding, gather, plain_record
from hybridkv.tiers.contract import (
    DamagedError,
    FindRequest,
    ReadRequest,
    RecordStart,
    Tier,
    TierError,
    UndecodableError,
    WriteRequest,
)
from hybridkv.tiers.record import is_encoded
from hybridkv.tiers.remote import sizes_of

REMEMBERED_MAX = 1 << 16  # Records that could not be decoded and are not read again.


class EncodedTier(Tier):
    """Wraps a tier, whose records are then encoded."""

    def __init__(self, tier: Tier, coding: Coding) -> None:
        self.name = tier.name
        self._tier = tier
        self._coding = coding
        self._undecodable: dict[bytes, None] = {}
        self._lock = threading.Lock()  # For `_undecodable` and the two sums.
        self._plain_bytes = self._encoded_bytes = 0

    def open(self) -> None:
        self._tier.open()

    def peek(self, key: bytes) -> bool | None:
        return False if key in self._undecodable else self._tier.peek(key)

    def find(self, keys: Sequence[bytes]) -> list[bool | None]:
        return self._decodable(keys, self._tier.find(keys))

    def has_other_writers(self) -> bool:
        return self._tier.has_other_writers()

    def find_again(self, wanted: Sequence[FindRequest]) -> list[bool | None]:
        keys = [request.key for request in wanted]
        return self._decodable(keys, self._tier.find_again(wanted))

    def use(self, keys: Sequence[bytes]) -> list[bool | None]:
        return self._decodable(keys, self._tier.use(keys))

    def _decodable(self, keys: Sequence[bytes], found: Sequence[bool | None]) -> list[bool | None]:
        return [
            is_there and key not in self._undecodable
            for key, is_there in zip(keys, found, strict=True)
        ]

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        # An encoded record may be a page longer than the plain one.
        spare = memoryview(mmap.mmap(-1, max(1, len(items)) * SLOT_ALIGN))
        spares = [spare[at * SLOT_ALIGN : (at + 1) * SLOT_ALIGN] for at in range(len(items))]
        errors = self._tier.get(
            [
                ReadRequest(item.key, [*item.pieces, page])
                for item, page in zip(items, spares, strict=True)
            ]
        )
        for at, (item, page) in enumerate(zip(items, spares, strict=True)):
            if errors[at] is None:
                errors[at] = self._decoded(item, page)
        return errors

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        return self._tier.read_starts(keys)

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        replaced = [item.key for item in items if item.key in self._undecodable]
        if replaced:
            self._tier.discard(replaced)
        errors: list[TierError | None] = [None] * len(items)
        puts: dict[int, WriteRequest] = {}
        for at, item in enumerate(items):
            try:
                memory = self._coding.encode(item.pieces)
                puts[at] = item if memory is None else item._replace(pieces=[memory])
            except TierError as failure:
                errors[at] = failure
        with self._lock:
            for key in replaced:
                self._undecodable.pop(key, None)
            self._plain_bytes += sum(sizes_of([items[at] for at in puts]))
            self._encoded_bytes += sum(sizes_of(list(puts.values())))
        for at, error in zip(puts, self._tier.put(list(puts.values())), strict=True):
            errors[at] = error
        return errors

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        self._tier.discard(keys, damaged)

    def erase(self, keys: Sequence[bytes]) -> list[TierError | None]:
        return self._tier.erase(keys)

    def empty_quarantine(self) -> None:
        self._tier.empty_quarantine()

    def keys(self) -> Iterator[bytes]:
        return self._tier.keys()

    def tend(self) -> None:
        self._tier.tend()

    def gauges(self) -> Mapping[str, float]:
        """Returns the tier's gauges, and the bytes of all records before and after encoding."""
        sizes = {
            "bytes_before_encoding": float(self._plain_bytes),
            "bytes_after_encoding": float(self._encoded_bytes),
        }
        return {**self._tier.gauges(), **(sizes if self._coding.encodes else {})}

    def close(self) -> None:
        self._tier.close()

    def _decoded(self, item: ReadRequest, spare: memoryview) -> TierError | None:
        """Decode a record in place. Returns its error, or None."""
        pieces = [*item.pieces, spare]
        try:
            if is_encoded(gather(pieces, 0, HEADER_BYTES)):
                self._coding.decode(pieces, item.pieces)
            elif bytes(spare).strip(b"\0"):
                raise DamagedError("it is longer than its object")
            elif plain_record(pieces) is not None:
                self._coding.check_plain()
        except UndecodableError as error:
            with self._lock:
                self._undecodable[item.key] = None
                if len(self._undecodable) > REMEMBERED_MAX:
                    del self._undecodable[next(iter(self._undecodable))]
            return error
        except DamagedError as error:
            return error
        return None
