"""Records as objects of a bucket, on S3 or what speaks its protocol.

::

    s3://BUCKET/PREFIX?region=eu-central-1
    s3://BUCKET/PREFIX?endpoint=http://127.0.0.1:9000

    PREFIX/KK/KEY              a record; KEY in hexadecimal digits, KK its first two
    PREFIX/quarantine/KEY      a damaged one, put aside

Credentials come from where the AWS tools have them: AWS_ACCESS_KEY_ID and its sisters, or the machine's role.  Without
`bytes` the bucket has no bound here, and its owner's lifecycle rules say what goes; with it, what lies below the prefix
is listed at the start, and the oldest objects go.
"""

import asyncio
import concurrent.futures
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from hybridkv.core.errors import ConfigError
from hybridkv.core.tiers import TierSpec
from hybridkv.storage.record import KEY_BYTES
from hybridkv.storage.tiers.base import DamagedError, FullError, Getting, MissingError, Putting, Tier, TierError
from hybridkv.storage.tiers.ledger import Ledger
from hybridkv.storage.tiers.remote import Deadline, batches

FLIGHT_BYTES_MAX = 64 << 20
"""Of objects on their way at once, where it is more than one."""
FLIGHT_REQUESTS_MAX = 16
WAVE_FIRST = 4
WAVE_MAX = 32
DELETE_MAX = 1000
COPY_STEP_BYTES = 1 << 20
"""So that no other thread waits longer for the interpreter's lock than a copy of as much takes."""
QUARANTINE_MAX = 16
"""Damaged objects that are put aside in a tier's life."""
LIST_SECONDS = 600.0
"""How often a bounded tier lists what lies below its prefix: others may write there too."""
GRACE_SECONDS = 0.5
RETRIES_MAX = 1

_T = TypeVar("_T")
_FAULTS = (BaseError, OSError, ValueError, RuntimeError)
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_PREFIX = re.compile(rf"{_PART}(/{_PART})*")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_FULL_CODES = frozenset(("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "EntityTooLarge"))


class S3Tier(Tier):
    """A prefix of a bucket."""

    name = "s3"

    def __init__(self, spec: TierSpec) -> None:
        """Raises ConfigError where the URL says nothing that could work."""
        parts = urlsplit(spec.location)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self._bucket):
            raise ConfigError(
                'tier s3: the URL names no bucket, and nothing else belongs before the first slash; "s3://BUCKET/PREFIX"'
                " works, with the credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        self._place = f"s3://{self._bucket}/{self._prefix}"
        options = replace(spec, location=self._place).known_options("endpoint", "region")
        if self._prefix and not _PREFIX.fullmatch(self._prefix):
            raise ConfigError(f'tier {self._place}: the prefix has to be of letters, digits, . _ - and /; "kv/1" works')
        self._endpoint = options.get("endpoint", "")
        if self._endpoint:
            address = urlsplit(self._endpoint)
            if address.scheme not in ("http", "https") or not address.hostname or "@" in address.netloc:
                raise ConfigError(
                    f"tier {self._place}: endpoint is no address of a server; endpoint=https://s3.example.com works"
                )
        self._region = options.get("region", "")
        self._timeout_seconds = spec.timeout_seconds
        self._opened: S3Store | None = None
        self._ledger = Ledger(spec.max_bytes) if spec.max_bytes else None
        self._room = threading.Lock()
        """Held while room is made: what is removed for one is not given to another before it is gone."""
        self._listing = threading.Lock()
        self._lock = threading.Lock()
        """For the ledger, the loop and what follows here; never held for long."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._listed_at = 0.0
        self._aside = 0

    # The contract

    def open(self) -> None:
        """See whether the bucket is there and ours; a bounded tier lists it all."""
        try:
            self._opened = self._connect()
        except (*_FAULTS, TypeError) as error:
            raise ConfigError(f"{self._place}: not usable ({type(error).__name__}); region=us-east-1 works") from None
        with self._lock:
            if self._closed:
                raise TierError("closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="hybridkv-s3", daemon=True)
                self._thread.start()
        if self._ledger is None:
            for _ in self._pages(self._list_error):
                return
        else:
            self._count(self._ledger, self._list_error)

    def peek(self, key: bytes) -> bool | None:
        return None

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        # One HEAD for each key, since a listing by prefix of hashes would bring a random share of the bucket. Keys come
        # prefix first, so they are asked for in waves that double, and nothing is asked behind a wave that found
        # nothing: a prompt that nobody stored costs one wave of WAVE_FIRST, one that is all there a request for each
        # key. A hole does not end it, since objects that only a shorter hit would need may have gone first.
        deadline = Deadline(self._timeout_seconds)
        found: list[bool] = []
        wave = WAVE_FIRST
        while len(found) < len(keys):
            asked = keys[len(found) : len(found) + wave]
            answers = self._each([partial(obstore.head_async, self._store, self._path(key)) for key in asked], deadline)
            for answer in answers:
                if isinstance(answer, TierError) and not isinstance(answer, MissingError):
                    raise answer
            found += [not isinstance(answer, TierError) for answer in answers]
            if not any(found[-len(asked) :]):
                break
            wave = min(2 * wave, WAVE_MAX)
        return found + [False] * (len(keys) - len(found))

    def get(self, items: Sequence[Getting]) -> list[TierError | None]:
        deadline = Deadline(self._timeout_seconds)
        sizes = [sum(map(len, item.pieces)) for item in items]
        results: list[TierError | None] = []
        works = [partial(self._fetch, item.key, size) for item, size in zip(items, sizes, strict=True)]
        for start, end in batches(sizes, FLIGHT_BYTES_MAX, FLIGHT_REQUESTS_MAX):
            for item, answer in zip(items[start:end], self._each(works[start:end], deadline), strict=True):
                if isinstance(answer, memoryview):
                    _spread(answer, item.pieces)
                    results.append(None)
                else:
                    results.append(answer)
        return results

    def put(self, items: Sequence[Putting]) -> list[TierError | None]:
        deadline = Deadline(self._timeout_seconds)
        sizes = [sum(map(len, item.pieces)) for item in items]
        results: list[TierError | None] = []
        for start, end in batches(sizes, FLIGHT_BYTES_MAX, FLIGHT_REQUESTS_MAX):
            results += self._put_batch(items[start:end], sizes[start:end], deadline)
        return results

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        deadline = Deadline(self._timeout_seconds)
        if damaged and self._ledger is None:  # a copy takes room, which under a bound sound ones need more
            with self._lock:
                room = QUARANTINE_MAX - self._aside
                self._aside += min(len(keys), room)
            aside = [
                partial(obstore.copy_async, self._store, self._path(key), self._join(f"quarantine/{key.hex()}"))
                for key in keys[:room]
            ]
            self._each(aside, deadline)
        self._delete([self._path(key) for key in keys], deadline)

    def keys(self) -> Iterator[bytes]:
        for page in self._pages(self._wrong):
            for name, _, _ in page:
                key = self._key(name)
                if key is not None:
                    yield key

    def tend(self) -> None:
        """Now and then, in a bounded tier, see what others have put and removed."""
        if self._ledger is not None and time.monotonic() - self._listed_at >= LIST_SECONDS:
            self._count(self._ledger, self._wrong)

    def gauges(self) -> Mapping[str, float]:
        """Nothing without a bound: nobody counts then."""
        if self._ledger is None:
            return {}
        ledger = self._ledger
        return {"bytes": ledger.bytes, "bytes_max": ledger.bytes_max, "objects": len(ledger)}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(GRACE_SECONDS)

    # Room

    def _put_batch(self, items: Sequence[Putting], sizes: Sequence[int], deadline: Deadline) -> list[TierError | None]:
        names = [self._path(item.key) for item in items]
        results = self._make_room(list(zip(names, sizes, strict=True)), deadline)
        let = [at for at, error in enumerate(results) if error is None]
        once = list({names[at]: at for at in let}.values())
        """Each object once: some servers do not take the same one twice at a time."""
        try:
            works = [partial(self._send, names[at], items[at].pieces) for at in once]
            answers = dict(zip((names[at] for at in once), self._each(works, deadline), strict=True))
            for at in let:
                answer = answers[names[at]]
                results[at] = answer if isinstance(answer, TierError) else None
                if isinstance(answer, MissingError):
                    results[at] = TierError(f"{self._place}: the bucket is gone")
        finally:
            if self._ledger is not None:
                with self._lock:
                    for at in let:
                        self._ledger.written(names[at])
        return results

    def _make_room(self, wanted: Sequence[tuple[str, int]], deadline: Deadline) -> list[TierError | None]:
        """For each None, or why it is not put; what is let in is being written from now on."""
        results: list[TierError | None] = [None for _ in wanted]
        if self._ledger is None:
            return results
        try:
            if not self._room.acquire(timeout=deadline.left()):
                raise TimeoutError
        except TimeoutError as error:
            return [self._wrong(error) for _ in wanted]
        try:
            with self._lock:
                plan = self._ledger.plan(wanted)
            self._delete(plan.victims, deadline)
            with self._lock:
                for at, (name, size) in enumerate(wanted):
                    if plan.admitted[at]:
                        self._ledger.admit(name, size)
                    else:
                        results[at] = FullError(f"{self._place} has no room for {size} bytes")
        except TierError as error:
            return [error for _ in wanted]
        finally:
            self._room.release()
        return results

    def _count(self, ledger: Ledger, wrong: Callable[[Exception], Exception]) -> None:
        """List what is there, and remove what is more than the bound."""
        with self._listing:
            self._listed_at = time.monotonic()
            with self._lock:
                ledger.begin()
            found = [entry for page in self._pages(wrong) for entry in page if self._is_ours(entry[0])]
            found.sort(key=lambda entry: entry[2])
            with self._room:
                with self._lock:
                    ledger.listed((name, size) for name, size, _ in found)
                    victims = ledger.plan([]).victims
                self._delete(victims, Deadline(self._timeout_seconds))

    def _delete(self, names: Sequence[str], deadline: Deadline) -> None:
        for start in range(0, len(names), DELETE_MAX):
            some = names[start : start + DELETE_MAX]
            (answer,) = self._each([partial(obstore.delete_async, self._store, some)], deadline)
            if isinstance(answer, TierError) and not isinstance(answer, MissingError):
                raise answer
            if self._ledger is not None:
                with self._lock:
                    self._ledger.gone(some)

    # Asking

    @property
    def _store(self) -> S3Store:
        if self._opened is None:
            raise TierError("not open yet")
        return self._opened

    def _connect(self) -> S3Store:
        limit = timedelta(seconds=self._timeout_seconds)
        where: dict[str, Any] = {}
        if self._endpoint:
            # The second one would otherwise come from the environment, and go before the first.
            where |= {"endpoint": self._endpoint, "aws_endpoint_url_s3": self._endpoint}
        if self._region:
            where["region"] = self._region
        return S3Store(
            self._bucket,
            **where,
            client_options={
                "allow_http": self._endpoint.startswith("http://"),
                "timeout": limit,
                "connect_timeout": limit,
            },
            retry_config={
                "max_retries": RETRIES_MAX,
                "retry_timeout": limit,
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(milliseconds=100),
                    "base": 2,
                },
            },
        )

    async def _fetch(self, key: bytes, size: int) -> memoryview:
        found = await obstore.get_async(self._store, self._path(key))
        if found.meta["size"] != size:
            raise DamagedError(f"it has {found.meta['size']} bytes instead of {size}")
        body = memoryview(await found.bytes_async())
        if len(body) != size:
            raise DamagedError(f"{len(body)} bytes came instead of {size}")
        return body

    async def _send(self, name: str, pieces: Sequence[memoryview]) -> None:
        # A request that is given up may still read the pieces for a moment; the server compares what came with the
        # signature of what was to come, and takes nothing else.
        await obstore.put_async(self._store, name, pieces, use_multipart=False)

    def _each(self, works: Sequence[Callable[[], Awaitable[_T]]], deadline: Deadline) -> list[_T | TierError]:
        """Do all at once; for each what came of it, or what was wrong. Never raises."""
        if not works:
            return []
        try:
            seconds = deadline.left()
            return self._run(self._gather(works, seconds), seconds + GRACE_SECONDS)
        except (TierError, TimeoutError) as error:
            return [self._wrong(error) for _ in works]

    async def _gather(self, works: Sequence[Callable[[], Awaitable[_T]]], seconds: float) -> list[_T | TierError]:
        late = self._wrong(TimeoutError())
        results: list[_T | TierError] = [late for _ in works]

        async def one(at: int) -> None:
            try:
                results[at] = await works[at]()
            except (TierError, *_FAULTS) as error:
                results[at] = self._wrong(error)

        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*map(one, range(len(works))))
        except TimeoutError:
            pass  # whose time was over has that result already
        return results

    def _pages(self, wrong: Callable[[Exception], Exception]) -> Iterator[list[tuple[str, int, float]]]:
        """What lies below the prefix, a page at a time: name, size, and when it was put."""
        stream = obstore.list(self._store, self._prefix or None, chunk_size=1000)

        async def following() -> list[tuple[str, int, float]]:
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    page = await anext(stream, None)
            except _FAULTS as error:
                raise wrong(error) from None
            return [(one["path"], one["size"], one["last_modified"].timestamp()) for one in page or ()]

        while page := self._run(following(), self._timeout_seconds + GRACE_SECONDS):
            yield page

    def _run(self, work: Coroutine[Any, Any, _T], seconds: float) -> _T:
        with self._lock:
            if self._loop is None:
                work.close()
                raise TierError("closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except concurrent.futures.CancelledError:
            raise TierError("closed") from None
        except TimeoutError as error:
            future.cancel()
            raise self._wrong(error) from None

    def _wrong(self, error: Exception) -> TierError:
        """What is told of an error: never the library's text, which shows requests, and those may show credentials."""
        if isinstance(error, TierError):
            return error
        if isinstance(error, FileNotFoundError):
            return MissingError("no such object")
        if isinstance(error, TimeoutError):
            return TierError(f"{self._place} does not answer within {self._timeout_seconds:g} s")
        status, code = _status(error)
        if code == "NoSuchKey":
            return MissingError("the object went while it was read")
        if status == 507 or code in _FULL_CODES:
            return FullError(f"{self._place} is full ({code or status})")
        said = " ".join(str(word) for word in (status, code) if word)
        return TierError(f"{self._place} {f'answers {said}' if said else 'does not answer'} ({type(error).__name__})")

    def _list_error(self, error: Exception) -> Exception:
        """What is wrong with the settings, where it is the first listing that fails."""
        status, code = _status(error)
        if code == "NoSuchBucket" or status == 404:
            return ConfigError(f"{self._place}: there is no bucket {self._bucket!r}; one that exists works")
        if status in (401, 403):
            return ConfigError(
                f"{self._place}: access is denied ({code or status}); AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of"
                " who may list, read, write and delete there work"
            )
        if status in (301, 307, 400) and code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
            return ConfigError(f"{self._place}: the bucket is in another region; region= of the bucket works")
        wrong = self._wrong(error)
        return TierError(str(wrong)) if isinstance(wrong, MissingError) else wrong

    # Names

    def _path(self, key: bytes) -> str:
        digits = key.hex()
        return self._join(f"{digits[:2]}/{digits}")

    def _join(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _key(self, name: str) -> bytes | None:
        digits = name.rpartition("/")[2]
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            return None
        return key if len(key) == KEY_BYTES and self._path(key) == name else None

    def _is_ours(self, name: str) -> bool:
        """Whether it may be removed for room; whatever else lies below the prefix is left alone, and not counted."""
        return self._key(name) is not None or name.startswith(self._join("quarantine/"))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """The thread that waits for answers: until the loop is stopped, which ends what still waits."""

    async def end() -> None:
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    loop.run_forever()
    loop.run_until_complete(end())
    loop.close()


def _spread(body: memoryview, pieces: Sequence[memoryview]) -> None:
    at = 0
    for piece in pieces:
        for start in range(0, len(piece), COPY_STEP_BYTES):
            step = piece[start : start + COPY_STEP_BYTES]
            step[:] = body[at : at + len(step)]
            at += len(step)


def _status(error: Exception) -> tuple[int | None, str]:
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    return int(status[1]) if status else None, code[1] if code else ""
