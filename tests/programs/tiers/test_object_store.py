"""Records in a real S3 server: rclone over a directory, which the tests read."""

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, TypeVar

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import S3Store

from hybridkv.core.errors import ConfigError
from hybridkv.core.keys import KEY_BYTES
from hybridkv.core.refusals import Refusal
from hybridkv.core.tier_urls import parse_tier
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.tiers import object_store as module
from hybridkv.tiers.coding import coding_of
from hybridkv.tiers.conformance.samples import SampleObject, make_sample, read
from hybridkv.tiers.conformance.suite import TierSuite
from hybridkv.tiers.contract import MissingError, ReadRequest, Tier, TierError, WriteRequest
from hybridkv.tiers.encoded import EncodedTier
from hybridkv.tiers.object_store import ObjectStoreTier
from tests.programs.tiers.front import EXPIRED, SLOW_DOWN, Front, Rate
from tests.programs.tiers.outages import (
    SLACK_SECONDS,
    assert_each_fails,
    assert_keeps_nobody_waiting,
    assert_survives_a_kill,
    calls,
)
from tests.programs.tiers.records import (
    assert_many_in_one_call,
    assert_other_lengths_are_damaged,
    each_opened,
)
from tests.programs.tiers.servers import ACCESS_KEY, SECRET_KEY, S3Server, free_port
from tests.programs.tiers.test_encoded import key_file
from tests.unit.daemon.tierclient import Client, stats
from tests.waiting import DEADLINE_SECONDS, until

Make = Callable[[str], ObjectStoreTier]
_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the server, and nothing else of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[S3Server]:
    with S3Server(tmp_path) as running:
        yield running


@pytest.fixture
def prefix() -> str:
    return f"kv/test{next(_numbers)}"


def tier_of(url: str) -> ObjectStoreTier:
    return ObjectStoreTier(parse_tier(url, "tier"))


@pytest.fixture
def make() -> Iterator[Make]:
    """Open tiers, closed at the end."""
    yield from each_opened(tier_of)


def files(server: S3Server, prefix: str) -> list[Path]:
    """The objects named by a key, and none of the temporary files that rclone makes."""
    return [path for path in (server.bucket / prefix).rglob("*") if len(path.name) == 2 * KEY_BYTES]


def name_of(prefix: str, sample: SampleObject) -> str:
    digits = sample.key.hex()
    return f"{prefix}/{digits[:2]}/{digits}"


def raw(server: S3Server) -> S3Store:
    """Returns a client of the bucket that is not the tier's."""
    return S3Store(
        server.bucket.name,
        endpoint=f"http://{server.address}",
        region="us-east-1",
        client_options={"allow_http": True},
    )


_Item = TypeVar("_Item")


class PatientTier(ObjectStoreTier):
    """Asks again, for what rclone does and S3 does not while others change an object.

    rclone breaks off the answer to who reads the object, and says InternalError to who puts it.
    Under load it may do so for long, and let whoever removes the object wait beyond the timeout.
    """

    is_patient = False

    def open(self) -> None:
        super().open()
        self.is_patient = True

    def close(self) -> None:
        self.is_patient = False  # A tier that is closed has no answer, however often it is asked.
        super().close()

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        return self._again(super().get, items)

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        return self._again(super().put, items)

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        def is_done() -> bool:
            with contextlib.suppress(TierError):
                super(PatientTier, self).discard(keys, damaged)
                return True
            return False

        until(is_done, "rclone removes it")

    def _again(
        self, call: Callable[[Sequence[_Item]], list[TierError | None]], items: Sequence[_Item]
    ) -> list[TierError | None]:
        results = call(items)

        def is_told() -> bool:
            broken = [at for at, error in enumerate(results) if type(error) is TierError]
            if broken:
                for at, error in zip(broken, call([items[at] for at in broken]), strict=True):
                    results[at] = error
            return not broken or not self.is_patient

        until(is_told, "rclone answers")
        return results


class TestS3(TierSuite):
    @pytest.fixture(autouse=True)
    def storage(self, server: S3Server, prefix: str) -> None:
        self.url = server.url(prefix)

    def make_tier(self) -> Tier:
        return PatientTier(parse_tier(self.url, "tier"))

    def make_away(self) -> Tier:
        return tier_of(f"s3://bucket/kv?endpoint=http://127.0.0.1:{free_port()}")


class TestWithoutPrefix(TestS3):
    @pytest.fixture(autouse=True)
    def storage(self, own_server: S3Server) -> None:
        self.url = own_server.url("")


class TestEncoded(TestS3):
    """Every record is compressed and encrypted on its way."""

    encoded = True

    @pytest.fixture(autouse=True)
    def storage(self, server: S3Server, prefix: str, tmp_path: Path) -> None:
        key, url = key_file(tmp_path / "tier.key", 1), server.url(prefix)
        self.url = f"{url}{'&' if '?' in url else '?'}codec=zplanes&key=file:{key}"

    def make_tier(self) -> Tier:
        spec = parse_tier(self.url, "tier")
        return EncodedTier(PatientTier(spec), coding_of(spec))


# What is in the bucket


def test_an_object_is_the_record(server: S3Server, prefix: str, make: Make) -> None:
    tier, sample = make(server.url(prefix)), make_sample(1)
    assert tier.put([sample.write_request(cut=2)]) == [None]
    assert (server.bucket / name_of(prefix, sample)).read_bytes() == sample.memory
    assert len(files(server, prefix)) == 1


def test_an_object_of_another_length_is_damaged(server: S3Server, prefix: str, make: Make) -> None:
    client = raw(server)

    def change(sample: SampleObject, value: bytes | None) -> None:
        if value is None:
            obstore.delete(client, name_of(prefix, sample))
        else:
            obstore.put(client, name_of(prefix, sample), value)

    assert_other_lengths_are_damaged(make(server.url(prefix)), change)


def test_damaged_objects_are_put_aside_and_what_is_not_ours_is_left_alone(
    server: S3Server, prefix: str, make: Make
) -> None:
    tier, sample = make(server.url(prefix)), make_sample(1)
    tier.put([sample.write_request()])
    for foreign in ("aa/notes.txt", f"zz/{make_sample(2).key.hex()}", "aa/aa"):
        obstore.put(raw(server), f"{prefix}/{foreign}", b"mine")
    tier.discard([sample.key, make_sample(3).key], damaged=True)
    assert (server.bucket / prefix / "quarantine" / sample.key.hex()).read_bytes() == sample.memory
    assert list(tier.keys()) == []
    assert isinstance(read(tier, sample), MissingError)
    for foreign in ("aa/notes.txt", f"zz/{make_sample(2).key.hex()}", "aa/aa"):
        assert (server.bucket / prefix / foreign).read_text() == "mine"


def test_many_in_one_call(
    server: S3Server, prefix: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLIGHT_REQUESTS_MAX", 7)
    monkeypatch.setattr(module, "FLIGHT_BYTES_MAX", 100_000)
    assert_many_in_one_call(make(server.url(prefix)), 40)


class Deleting(BaseHTTPRequestHandler):
    """Says of every request that all of its objects were deleted, and counts them."""

    counts: ClassVar[list[int]]

    def do_POST(self) -> None:
        """Answer DeleteObjects."""
        body = self.rfile.read(int(self.headers["content-length"]))
        names = re.findall(rb"<Key>[^<]*</Key>", body)
        self.counts.append(len(names))
        deleted = b"".join(b"<Deleted>%b</Deleted>" % name for name in names)
        self._answer(b"<DeleteResult>%b</DeleteResult>" % deleted)

    def do_GET(self) -> None:
        """Answer ListObjects: there are none."""
        self._answer(b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")

    def _answer(self, answer: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


def test_no_request_deletes_more_than_s3_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deleting, "counts", [], raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Deleting) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        tier = tier_of(f"s3://bucket/kv?endpoint={address}&region=us-east-1")
        try:
            tier.open()
            tier.discard([])
            assert not Deleting.counts
            tier.discard([number.to_bytes(KEY_BYTES) for number in range(2100)])
        finally:
            tier.close()
            server.shutdown()
            thread.join(DEADLINE_SECONDS)
    assert sorted(Deleting.counts) == [100, 1000, 1000]


def test_what_is_found_while_others_fail_is_found(
    server: S3Server, prefix: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, samples = make(server.url(prefix)), [make_sample(number) for number in range(40)]
    tier.put([sample.write_request() for sample in samples])
    head, failing = (
        obstore.head_async,
        {name_of("", sample).lstrip("/") for sample in samples[1::3]},
    )

    async def some_heads(store: S3Store, name: str) -> object:
        if name in failing:
            raise GenericError("Server returned non-2xx status code: 503 Service Unavailable")
        return await head(store, name)

    monkeypatch.setattr(obstore, "head_async", some_heads)
    assert tier.find([sample.key for sample in samples]) == [
        None if number % 3 == 1 else True for number in range(40)
    ]
    failing |= {name_of("", sample).lstrip("/") for sample in samples}
    with pytest.raises(TierError, match="503"):
        tier.find([sample.key for sample in samples])
    monkeypatch.setattr(module, "WAVE_REQUESTS", 4)
    failing -= {name_of("", sample).lstrip("/") for sample in samples[:4]}
    assert tier.find([sample.key for sample in samples]) == [True] * 4 + [None] * 36


# Servers that are gone, hung, or back again


@pytest.mark.soak
def test_a_killed_server_is_an_error_until_it_is_back(own_server: S3Server, make: Make) -> None:
    tier, sample = make(own_server.url("kv")), make_sample(1)
    assert tier.put([sample.write_request()]) == [None]
    own_server.kill()
    assert_each_fails(calls(tier), SLACK_SECONDS)
    own_server.start()
    tier.open()
    assert read(tier, sample) is None
    assert tier.put([sample.write_request()]) == [None]


@pytest.mark.soak
def test_a_stopped_server_keeps_nobody_waiting(own_server: S3Server, make: Make) -> None:
    tier = make(own_server.url("kv", "&timeout=0.3"))
    large = [make_sample(3, 8 << 20, 2), *map(make_sample, range(40))]
    assert_keeps_nobody_waiting(tier, own_server, calls(tier), large)


def test_a_tier_that_is_not_open_yet_is_an_error() -> None:
    tier = tier_of("s3://bucket/kv")
    with pytest.raises(TierError):
        tier.find([make_sample(1).key])
    tier.close()


# Settings that can never work


def sentence(url: str) -> str:
    def opened() -> None:
        tier = tier_of(url)
        try:
            tier.open()
        finally:
            tier.close()

    with pytest.raises(ConfigError) as caught:
        opened()
    text = str(caught.value)
    assert " work" in text
    assert "\n" not in text
    for secret in (SECRET_KEY, ACCESS_KEY, "qzx", "jwv"):
        assert secret not in text
    return text


def test_a_bucket_that_is_not_there(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no bucket 'other'" in sentence(server.url("kv").replace("bucket", "other"))


def test_credentials_that_are_wrong(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "qzxjwv")
    assert "access is denied (SignatureDoesNotMatch)" in sentence(server.url("kv"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "qzxjwv-nobody")
    assert "AWS_ACCESS_KEY_ID" in sentence(server.url("kv"))


def test_keys_that_are_rotated_in_their_file_are_used_after_the_next_opening(
    own_server: S3Server, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"

    def write(secret: str) -> None:
        login = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {secret}\n"
        file.write_text(f"[default]\nregion = nowhere\n{login}[other]\naws_access_key_id = qzx\n")

    write(SECRET_KEY)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    tier, sample = make(own_server.url("kv")), make_sample(1)
    assert tier.put([sample.write_request()]) == [None]
    own_server.kill()
    changed = [word.replace(SECRET_KEY, "the%second/one") for word in own_server.command()]
    own_server.command = lambda: changed  # type: ignore[method-assign]
    own_server.start()
    (error,) = tier.put([sample.write_request()])
    assert error is not None
    assert error.refusal is None, "it is opened anew"
    write("the%second/one")
    tier.close()
    tier.open()
    assert tier.put([sample.write_request()]) == [None]
    assert read(tier, sample) is None


@pytest.fixture
def front(own_server: S3Server) -> Iterator[Front]:
    with Front(own_server.address) as running:
        yield running


def token_file(path: Path, token: str) -> None:
    """Write a login with a token that ends, as the tools of AWS do."""
    login = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    path.with_suffix(".new").write_text(f"[default]\n{login}aws_session_token = {token}\n")
    path.with_suffix(".new").replace(path)


def test_a_token_that_ends_in_the_middle_of_a_run_is_renewed(
    front: Front, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, taken = tmp_path / "credentials", {"first"}
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.0)
    front.rule = lambda headers: None if headers["x-amz-security-token"] in taken else EXPIRED
    token_file(file, "first")
    tier = make(f"s3://bucket/kv?endpoint=http://{front.address}&region=us-east-1")
    samples = [make_sample(number) for number in range(4)]
    assert tier.put([samples[0].write_request()]) == [None]
    # A file that is written in time costs no request.
    taken.add("second")
    token_file(file, "second")
    tier.tend()
    taken.remove("first")
    assert tier.put([samples[1].write_request()]) == [None]
    assert tier.gauges()["logins_renewed"] == 1
    # A file that is written late costs those until the next second.
    taken.clear()
    taken.add("third")
    for _ in range(2):
        (error,) = tier.put([samples[2].write_request()])
        assert error is not None
        assert "ExpiredToken" in str(error)
        tier.tend()
    token_file(file, "third")
    tier.tend()
    assert tier.put([sample.write_request() for sample in samples]) == [None] * 4
    assert [read(tier, sample) for sample in samples] == [None] * 4


def test_a_file_of_logins_that_is_no_login_changes_nothing(
    front: Front, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, sample = tmp_path / "credentials", make_sample(1)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    tier = make(f"s3://bucket/kv?endpoint=http://{front.address}&region=us-east-1")
    file.write_text("[default\n")
    tier.tend()
    assert tier.put([sample.write_request()]) == [None]


def test_a_throttled_bucket_refuses_and_does_not_fail(front: Front, make: Make) -> None:
    tier = make(f"s3://bucket/kv?endpoint=http://{front.address}&region=us-east-1")
    samples = [make_sample(number) for number in range(3)]
    assert tier.put([sample.write_request() for sample in samples]) == [None] * 3
    front.rule = lambda headers: SLOW_DOWN
    errors = [*tier.put([make_sample(9).write_request()]), read(tier, samples[0])]
    assert [error and error.refusal for error in errors] == [Refusal.RATE] * 2
    with pytest.raises(TierError) as caught:
        tier.find([sample.key for sample in samples])
    assert caught.value.refusal is Refusal.RATE
    front.rule = lambda headers: None
    assert tier.find([sample.key for sample in samples]) == [True] * 3
    assert [read(tier, sample) for sample in samples] == [None] * 3


@pytest.mark.soak
def test_a_bucket_at_five_requests_a_second_slows_nobody(front: Front, tmp_path: Path) -> None:
    """Each lookup ends at its deadline at the latest, and hits come back when it is over."""
    prompts, chunks, wait_ms = 12, 4, 500
    url = f"s3://bucket/kv?endpoint=http://{front.address}&region=us-east-1"
    socket_path = str(tmp_path / "daemon.sock")
    daemon = DaemonProcess(socket_path, "128MiB", options=["--tier", url])

    def value(name: str) -> float:
        return stats(socket_path).get(f"tier_s3_{name}", 0)

    with daemon:
        with Client(socket_path) as client:
            for prompt in range(prompts):
                client.store(prompt, chunks)
            objects = client.values()["objects_stored"]
            until(lambda: value("objects_written") == objects, "everything is written")
        daemon.end()
        front.rule = rate = Rate(per_second=5)
        daemon.start()
        until(lambda: value("is_open") == 1, "it is open")
        with Client(socket_path) as client:
            for prompt in range(prompts):
                answer = client.look_up(prompt, chunks, wait_ms)
                assert answer.seconds < wait_ms / 1000 + SLACK_SECONDS
                client.prove(answer.found, prompt)
                client.release(answer.found.lease)
            assert rate.refused, "it was throttled"
            assert value("failures"), "it is counted"
            front.rule = lambda headers: None

            def is_whole(prompt: int) -> bool:
                found = client.look_up(prompt, chunks, 20_000).found
                client.prove(found, prompt)
                client.release(found.lease)
                return found.chunks == chunks

            for prompt in range(prompts):
                until(lambda prompt=prompt: is_whole(prompt), "its hit is back")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs:///kv", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az:///kv", "az://CONTAINER"),
        ("gs://bucket/kv?region=eu", "unknown option 'region'"),
        ("s3:///kv", "names no bucket"),
        ("s3://user:qzxjwv@bucket/kv", "names no bucket"),
        ("s3://bucket:99/kv", "names no bucket"),
        ("s3://bucket/a//b", "the prefix"),
        ("s3://bucket/a/../b", "the prefix"),
        ("s3://bucket/a b", "the prefix"),
        ("s3://bucket/kv?endpoint=127.0.0.1:9000", "endpoint"),
        ("s3://bucket/kv?endpoint=http://user:qzxjwv@127.0.0.1:9000", "endpoint"),
        ("s3://bucket/kv?endpoint=ftp://127.0.0.1", "endpoint"),
        ("s3://bucket/kv?endpoint=http://[", "endpoint is no address"),
    ],
)
def test_a_url_that_cannot_work(url: str, words: str) -> None:
    assert words in sentence(url)


def test_plain_http_is_only_for_an_endpoint_that_says_so(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server.address}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    tier = tier_of("s3://bucket/kv?region=us-east-1")
    with pytest.raises((TierError, ConfigError)):
        tier.open()
    tier.close()


def test_a_server_killed_in_the_middle_of_a_call(own_server: S3Server, make: Make) -> None:
    assert_survives_a_kill(make(own_server.url("kv")), own_server, 4)
