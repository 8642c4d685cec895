"""Records as objects of a bucket: on S3 or what speaks its protocol, Google's, or Azure's.

::

    s3://BUCKET/PREFIX?region=eu-central-1
    s3://BUCKET/PREFIX?endpoint=http://127.0.0.1:9000
    gs://BUCKET/PREFIX
    az://CONTAINER/PREFIX?account=NAME

    PREFIX/KK/KEY              a record; KEY in hexadecimal digits, KK its first two
    PREFIX/quarantine/KEY      a damaged one, put aside

Credentials come from where the provider's own tools have them: variables, a file, or the machine's
role. `open` looks for them anew, and so does `tend` once a file of theirs has changed, or a server
has refused them. The bucket has no bound here. Its owner's lifecycle rules decide what goes.
"""

import asyncio
import concurrent.futures
import configparser
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, GenericError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from hybridkv.core.errors import ConfigError
from hybridkv.core.refusals import Refusal
from hybridkv.core.tier_urls import TierSpec
from hybridkv.tiers import contract
from hybridkv.tiers.contract import ReadRequest, RecordStart, Tier, TierError, WriteRequest
from hybridkv.tiers.remote import FIND_SHARE, KEY_DIGITS, Deadline, copy_steps, in_batches

logger = logging.getLogger("hybridkv.daemon")

FLIGHT_BYTES_MAX = 64 << 20
"""The most bytes of objects that are on their way at once. One object may have more."""
FLIGHT_REQUESTS_MAX = 16
WAVE_REQUESTS = 32  # HEAD requests at once, or removals where each is a request of its own.
ASIDE = "quarantine/"
QUARANTINE_MAX = 16  # Damaged objects that are put aside in a tier's life.
GRACE_SECONDS = 0.5
RETRIES_MAX = 1
RENEW_SECONDS = 5.0  # Between two logins that are looked for because a server refused one.

_T = TypeVar("_T")
_Request: TypeAlias = Callable[[], Awaitable[_T]]
_Translate: TypeAlias = Callable[[Exception], Exception]  # From an error to the caller's.
_FAULTS = (BaseError, OSError, ValueError, RuntimeError)
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_PREFIX = re.compile(rf"{_PART}(/{_PART})*")
_OURS = re.compile(rf"(..)/(?=\1)({KEY_DIGITS})")
_LOGIN = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_FULL_CODES: Mapping[str, Refusal] = {
    "QuotaExceeded": Refusal.QUOTA,
    "XMinioStorageFull": Refusal.QUOTA,
    "InsufficientStorage": Refusal.QUOTA,
    "EntityTooLarge": Refusal.TOO_LARGE,
    "RequestBodyTooLarge": Refusal.TOO_LARGE,
}
_REFUSAL_CODES: Mapping[str, Refusal] = {
    "AccessDenied": Refusal.PERMISSION,
    "AuthorizationFailure": Refusal.PERMISSION,
    "AuthorizationPermissionMismatch": Refusal.PERMISSION,
    "RequestLimitExceeded": Refusal.RATE,
    "ServerBusy": Refusal.RATE,
    "SlowDown": Refusal.RATE,
    "Throttling": Refusal.RATE,
    "TooManyRequests": Refusal.RATE,
}
_ABSENT_CODES = ("NoSuchBucket", "ContainerNotFound")
_AWS_FILE = "~/.aws/credentials"
_GOOGLE_FILE = "~/.config/gcloud/application_default_credentials.json"
_REGION_CODES = ("PermanentRedirect", "AuthorizationHeaderMalformed")
_LOGIN_CODES = frozenset(
    (
        *("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"),
        *("InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestExpired"),
        *("AuthenticationFailed", "InvalidAuthenticationInfo"),
    )
)
"""Errors after which other credentials may be taken: those that are used have ended."""


class Provider(NamedTuple):
    """What differs between the providers of buckets."""

    make_store: Callable[..., ObjectStore]
    example: str  # A URL that works.
    endpoint_setting: str  # The library's name of the option `endpoint`.
    settings: Mapping[str, str]  # The library's names of the provider's other options.
    login: str  # What makes requests permitted, for people.
    login_files: Mapping[str, str]
    """By the variable that names a file with credentials: where it is without the variable."""
    read_login: Callable[[], Mapping[str, str]] = dict
    """Returns settings of a login that the library does not find by itself."""
    removes_many: bool = False  # Whether a request removes many objects, missing ones too.


class ObjectStoreTier(Tier):
    """Keeps records as objects below a prefix of a bucket."""

    def __init__(self, spec: TierSpec) -> None:
        """Raises ConfigError for settings that can never work."""
        self.name = spec.kind
        self._provider = _PROVIDERS[spec.kind]
        parts = urlsplit(spec.location)
        self._bucket, prefix = parts.netloc, parts.path.strip("/")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self._bucket):
            raise ConfigError(
                f"tier {spec.kind}: the URL names no bucket, and nothing else belongs before the"
                " first slash",
                f"{self._provider.example} works, with {self._provider.login}",
            )
        self._place = f"{spec.kind}://{self._bucket}/{prefix}"
        shown, bounds = replace(spec, location=self._place), "the bucket's lifecycle rules"
        options = shown.known_options("endpoint", *self._provider.settings, bounded_by=bounds)
        if prefix and not _PREFIX.fullmatch(prefix):
            raise ConfigError(
                f"tier {self._place}: the prefix has to be of letters, digits, . _ - and /",
                '"kv/1" works',
            )
        self._settings: dict[str, Any] = {
            setting: options[name]
            for name, setting in self._provider.settings.items()
            if options.get(name)
        }
        endpoint = options.get("endpoint", "")
        if endpoint:
            try:
                address = urlsplit(endpoint)
            except ValueError:
                address = urlsplit("")
            is_http = address.scheme in ("http", "https") and address.hostname
            if not is_http or "@" in address.netloc:
                raise ConfigError(
                    f"tier {self._place}: endpoint is no address of a server",
                    "endpoint=https://s3.example.com works",
                )
            self._settings[self._provider.endpoint_setting] = endpoint
        limit = timedelta(seconds=spec.timeout_seconds)
        backoff, backoff_max = timedelta(milliseconds=50), timedelta(milliseconds=100)
        is_plain = endpoint.startswith("http://")
        self._settings |= {
            "prefix": prefix or None,
            "client_options": {"allow_http": is_plain, "timeout": limit, "connect_timeout": limit},
            "retry_config": {
                "max_retries": RETRIES_MAX,
                "retry_timeout": limit,
                "backoff": {"init_backoff": backoff, "max_backoff": backoff_max, "base": 2},
            },
        }
        self.timeout_seconds = spec.timeout_seconds
        self._opened: ObjectStore | None = None
        self._login_stamp: Sequence[float] = ()  # Of the files with credentials, when it was made.
        self._is_login_refused = False
        self._renew_at = 0.0  # Before that, no login is looked for because one was refused.
        self._lock = threading.Lock()  # For the attributes below.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread  # Serves the loop, where there is one.
        self._aside = 0
        self._logins_renewed = 0

    # The contract

    def open(self) -> None:
        """List the first names, which shows whether the bucket can be used."""
        self._log_in()
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                serve, name = partial(_serve, self._loop), f"hybridkv-{self.name}"
                self._thread = threading.Thread(target=serve, name=name, daemon=True)
                self._thread.start()
        next(self._names(self._list_error), None)

    def find(self, keys: Sequence[bytes]) -> list[bool | None]:
        # There is one HEAD for each key, since a listing by a prefix of hashes would bring a random
        # share of the bucket. The call as a whole fails only where all requests do.
        deadline = Deadline(FIND_SHARE * self.timeout_seconds)
        answers: list[Any] = []
        while len(answers) < len(keys):
            wave = keys[len(answers) : len(answers) + WAVE_REQUESTS]
            requests = [partial(obstore.head_async, self._store, _path(key)) for key in wave]
            answers += self._do_all(requests, deadline)
            if all(map(_is_failure, answers[-len(wave) :])):
                break
        errors = list(filter(_is_failure, answers))
        if errors and len(errors) == len(answers):
            raise errors[0]
        found = [
            None if _is_failure(answer) else not isinstance(answer, TierError) for answer in answers
        ]
        return found + [None] * (len(keys) - len(found))

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        deadline = Deadline(self.timeout_seconds)

        def read(batch: Sequence[ReadRequest], sizes: Sequence[int]) -> list[TierError | None]:
            requests = [
                partial(self._fetch, item, size) for item, size in zip(batch, sizes, strict=True)
            ]
            answers = self._do_all(requests, deadline)
            for item, answer in zip(batch, answers, strict=True):
                if isinstance(answer, memoryview):
                    pieces = contract.first_bytes(item.pieces, len(answer))
                    for part, content in copy_steps(pieces, answer):
                        part[:] = content
                    contract.zero_after(item.pieces, len(answer))
            return [answer if isinstance(answer, TierError) else None for answer in answers]

        return in_batches(items, FLIGHT_BYTES_MAX, FLIGHT_REQUESTS_MAX, read)

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        deadline = Deadline(self.timeout_seconds)
        answers: list[RecordStart | TierError] = []
        while len(answers) < len(keys):
            wave = keys[len(answers) : len(answers) + WAVE_REQUESTS]
            requests = [partial(self._fetch_start, key) for key in wave]
            answers += map(self._start_or_error, self._do_all(requests, deadline))
        return answers

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        deadline = Deadline(self.timeout_seconds)

        def write(batch: Sequence[WriteRequest], _sizes: Sequence[int]) -> list[TierError | None]:
            # A request that is given up may still read the pieces for a moment. S3 compares the
            # bytes with the signature that it was sent before. Elsewhere an object of other bytes
            # may appear, and its checksums are wrong for whoever reads it.
            send = partial(obstore.put_async, self._store, use_multipart=False)
            # Each object is sent once: some servers refuse two puts of one name at a time.
            pieces_of = {_path(item.key): item.pieces for item in batch}
            requests = [partial(send, name, pieces) for name, pieces in pieces_of.items()]
            errors: dict[str, TierError | None] = dict.fromkeys(pieces_of)
            for name, answer in zip(pieces_of, self._do_all(requests, deadline), strict=True):
                if isinstance(answer, contract.MissingError):
                    errors[name] = TierError(f"{self._place}: the bucket is gone")
                elif isinstance(answer, TierError):
                    errors[name] = answer
            return [errors[_path(item.key)] for item in batch]

        return in_batches(items, FLIGHT_BYTES_MAX, FLIGHT_REQUESTS_MAX, write)

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        deadline = Deadline(self.timeout_seconds)
        if damaged:
            with self._lock:
                room = QUARANTINE_MAX - self._aside
                self._aside += min(len(keys), room)
            copy = partial(obstore.copy_async, self._store)
            copies = [partial(copy, _path(key), ASIDE + key.hex()) for key in keys[:room]]
            self._do_all(copies, deadline)
        self._remove([_path(key) for key in keys], deadline)

    def empty_quarantine(self) -> None:
        names = [name for name in self._names(self._tier_error) if name.startswith(ASIDE)]
        self._remove(names, Deadline(self.timeout_seconds))

    def keys(self) -> Iterator[bytes]:
        for name in self._names(self._tier_error):
            if ours := _OURS.fullmatch(name):
                yield bytes.fromhex(ours[2])

    def tend(self) -> None:
        """Look for a login if a file of credentials has changed, or the login was refused."""
        is_due = self._is_login_refused and time.monotonic() >= self._renew_at
        if self._opened is not None and (is_due or self._read_stamp() != self._login_stamp):
            try:
                self._log_in()
            except ConfigError as error:  # A file may be half written at this moment.
                raise TierError(str(error)) from error
            self._logins_renewed += 1
            logger.info("%s: its login was read anew", self._place)

    def gauges(self) -> Mapping[str, float]:
        """Returns how often a login was read anew."""
        return {"logins_renewed": float(self._logins_renewed)}

    def close(self) -> None:
        with self._lock:
            loop, self._loop, self._opened = self._loop, None, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(GRACE_SECONDS)

    # Requests

    @property
    def _store(self) -> ObjectStore:
        if self._opened is None:
            raise TierError("not open yet")
        return self._opened

    def _log_in(self) -> None:
        """Use the login that is there now from the next request on. Raises ConfigError."""
        self._login_stamp = self._read_stamp()
        self._is_login_refused, self._renew_at = False, time.monotonic() + RENEW_SECONDS
        settings = {**self._settings, **self._provider.read_login()}
        try:
            self._opened = self._provider.make_store(self._bucket, **settings)
        except (*_FAULTS, TypeError) as error:
            what = f"{self._place}: not usable ({type(error).__name__})"
            raise ConfigError(what, f"{self._provider.example} works") from None

    def _read_stamp(self) -> Sequence[float]:
        """Returns when each file of credentials was changed. 0 = there is none."""
        files = self._provider.login_files
        return [_changed_at(os.environ.get(name) or path) for name, path in files.items()]

    def _remove(self, names: Sequence[str], deadline: Deadline) -> None:
        """Remove objects, missing ones too. Raises TierError."""
        # The library sends as many names in one request as a server takes. One that is missing is
        # an error of some providers, after which the library would stop.
        at_once = max(len(names), 1) if self._provider.removes_many else 1
        groups = [names[at : at + at_once] for at in range(0, len(names), at_once)]
        for at in range(0, len(groups), WAVE_REQUESTS):
            wave = groups[at : at + WAVE_REQUESTS]
            delete = partial(obstore.delete_async, self._store)
            self._do_all_checked([partial(delete, group) for group in wave], deadline)

    async def _fetch(self, item: ReadRequest, size: int) -> memoryview:
        found = await obstore.get_async(self._store, _path(item.key))
        if not contract.is_length(found.meta["size"], size):
            raise contract.DamagedError(f"it has {found.meta['size']} bytes instead of {size}")
        body = memoryview(await found.bytes_async())
        if len(body) != found.meta["size"]:
            raise contract.DamagedError(f"{len(body)} bytes came, not {found.meta['size']}")
        return body

    async def _fetch_start(self, key: bytes) -> RecordStart:
        try:
            part = (0, contract.START_BYTES)
            found = await obstore.get_async(self._store, _path(key), options={"range": part})
            start = bytes(await found.bytes_async())
        except GenericError:
            # Some servers, as rclone's, answer a range with a status that the library refuses.
            found = await obstore.get_async(self._store, _path(key))
            chunks = found.stream(min_chunk_size=contract.START_BYTES)
            start = bytes(await anext(chunks, b""))[: contract.START_BYTES]
        meta = found.meta
        return RecordStart(start, meta["size"], meta["last_modified"].timestamp())

    def _start_or_error(self, answer: RecordStart | Exception) -> RecordStart | TierError:
        return answer if isinstance(answer, RecordStart) else self._tier_error(answer)

    def _names(self, translate: _Translate) -> Iterator[str]:
        """Yields the names below the prefix. Raises what `translate` makes of an error."""
        next_page = partial(anext, obstore.list(self._store, chunk_size=1000), None)
        while page := self._do_all([next_page], Deadline(self.timeout_seconds), translate)[0]:
            if isinstance(page, Exception):
                raise page
            yield from (entry["path"] for entry in page)

    def _do_all_checked(
        self, requests: Sequence[_Request[_T]], deadline: Deadline
    ) -> list[_T | Exception]:
        """Do all at once. Returns each answer, or its MissingError. Raises any other TierError."""
        answers = self._do_all(requests, deadline)
        for error in filter(_is_failure, answers):
            raise error
        return answers

    def _do_all(
        self,
        requests: Sequence[_Request[_T]],
        deadline: Deadline,
        translate: _Translate | None = None,
    ) -> list[_T | Exception]:
        """Do all at once. Returns each answer, or its error after `translate`. Never raises."""
        translate = translate or self._tier_error
        try:
            seconds = deadline.seconds_left()
            with self._lock:
                if self._loop is None:
                    raise TierError("closed")
                futures = [
                    asyncio.run_coroutine_threadsafe(_do(request), self._loop)
                    for request in requests
                ]
        except (TierError, TimeoutError) as error:
            return [translate(error) for _ in requests]
        concurrent.futures.wait(futures, seconds)
        results: list[_T | Exception] = []
        for future in futures:
            try:
                answer = future.result(0)
            except concurrent.futures.CancelledError:
                answer = TierError("closed")
            except TimeoutError as error:
                future.cancel()
                answer = error
            results.append(translate(answer) if isinstance(answer, Exception) else answer)
        return results

    def _tier_error(self, error: Exception) -> TierError:
        """Returns the caller's error, without the library's text, which may show credentials."""
        if isinstance(error, TierError):
            return error
        if isinstance(error, FileNotFoundError):
            return contract.MissingError("no such object")
        if isinstance(error, TimeoutError):
            return TierError(f"{self._place} does not answer within {self.timeout_seconds:g} s")
        status, code = _status(error)
        if code == "NoSuchKey":
            return contract.MissingError("the object went while it was read")
        if status == 507 or code in _FULL_CODES:
            what = f"{self._place} is full ({code or status})"
            return contract.FullError(what, _FULL_CODES.get(code, Refusal.QUOTA))
        if status == 401 or code in _LOGIN_CODES:
            self._is_login_refused = True
        words = " ".join(str(word) for word in (status, code) if word)
        does = f"answers {words}" if words else "does not answer"
        refusal = _REFUSAL_CODES.get(code)
        if status == 429 or (status == 503 and not code):  # An answer to HEAD has no code.
            refusal = Refusal.RATE
        return TierError(f"{self._place} {does} ({type(error).__name__})", refusal)

    def _list_error(self, error: Exception) -> Exception:
        """Returns the error of the first listing, which may be the fault of a setting."""
        status, code = _status(error)
        if code in _ABSENT_CODES or status == 404:
            what, remedy = f"there is no bucket {self._bucket!r}", "one that exists works"
        elif status in (401, 403):
            what = f"access is denied ({code or status})"
            remedy = f"{self._provider.login} of who may list, read, write and delete there work"
        elif status in (301, 307, 400) and code in _REGION_CODES:
            what, remedy = "the bucket is in another region", "region= of the bucket works"
        else:
            failure = self._tier_error(error)
            is_missing = isinstance(failure, contract.MissingError)
            return TierError(str(failure)) if is_missing else failure
        return ConfigError(f"{self._place}: {what}", remedy)


def _changed_at(path: str) -> float:
    try:
        return os.stat(os.path.expanduser(path)).st_mtime if path else 0.0
    except OSError:
        return 0.0


def _login_of_file() -> dict[str, str]:
    """Returns the keys in the credentials file of the AWS tools, by the names of the library.

    The library reads the environment, which goes before, and the machine's role. Empty = the
    environment has a login, or the file has none.
    """
    if os.environ.keys() & {"AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"}:
        return {}
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or _AWS_FILE
    profile = os.environ.get("AWS_PROFILE") or "default"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(os.path.expanduser(file))
    except (configparser.Error, UnicodeDecodeError):
        return {}
    found = dict(parser[profile]) if parser.has_section(profile) else {}
    return {name: value for name, value in found.items() if name in _LOGIN}


def _path(key: bytes) -> str:
    return f"{key[:1].hex()}/{key.hex()}"


def _is_failure(answer: object) -> TypeGuard[TierError]:
    return isinstance(answer, TierError) and not isinstance(answer, contract.MissingError)


async def _do(request: _Request[_T]) -> _T | Exception:
    # An error is returned, because asyncio would log the text of an error that nobody takes.
    try:
        return await request()
    except (TierError, *_FAULTS) as error:
        return error


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop in its thread until it is stopped. Requests that wait then are cancelled."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


def _status(error: Exception) -> tuple[int | None, str]:
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    return int(status[1]) if status else None, code[1] if code else ""


_PROVIDERS: Mapping[str, Provider] = {
    "s3": Provider(
        make_store=S3Store,
        example='"s3://BUCKET/PREFIX?region=us-east-1"',
        # The environment may set this one, and it would win over the library's `endpoint`.
        endpoint_setting="aws_endpoint_url_s3",
        settings={"region": "region"},
        login="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        login_files={"AWS_SHARED_CREDENTIALS_FILE": _AWS_FILE},
        read_login=_login_of_file,
        removes_many=True,
    ),
    "gs": Provider(
        make_store=GCSStore,
        example='"gs://BUCKET/PREFIX"',
        endpoint_setting="base_url",
        settings={},
        login="GOOGLE_APPLICATION_CREDENTIALS, a file",
        login_files={"GOOGLE_APPLICATION_CREDENTIALS": _GOOGLE_FILE, "GOOGLE_SERVICE_ACCOUNT": ""},
    ),
    "az": Provider(
        make_store=AzureStore,
        example='"az://CONTAINER/PREFIX?account=NAME"',
        endpoint_setting="endpoint",
        settings={"account": "account_name"},
        login="AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or a managed identity",
        # The library itself reads the file of a federated token again.
        login_files={},
    ),
}
"""The providers, by the scheme of the URL."""
