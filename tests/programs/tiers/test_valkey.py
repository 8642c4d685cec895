"""Records in a real Valkey server."""

import contextlib
import itertools
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import valkey as library
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hybridkv.core.errors import ConfigError
from hybridkv.core.refusals import Refusal
from hybridkv.core.tier_urls import parse_tier
from hybridkv.tiers.conformance.samples import SampleObject, make_sample, read
from hybridkv.tiers.conformance.suite import TierSuite
from hybridkv.tiers.contract import DamagedError, FullError, MissingError, Tier, TierError
from hybridkv.tiers.factory import make_tier
from hybridkv.tiers.remote import Deadline
from hybridkv.tiers.valkey import pool as module
from hybridkv.tiers.valkey.pool import ConnectionPool
from hybridkv.tiers.valkey.resp import RespConnection
from hybridkv.tiers.valkey.tier import ValkeyTier
from tests.programs.tiers.outages import (
    SLACK_SECONDS,
    assert_closing_wakes,
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
from tests.programs.tiers.servers import ValkeyServer, free_port
from tests.programs.tiers.test_encoded import key_file
from tests.unit.daemon.harness import engine
from tests.unit.daemon.tier_node import FULL, Node
from tests.waiting import DEADLINE_SECONDS

Make = Callable[[str], ValkeyTier]
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as running:
        yield running


def tier_of(url: str) -> ValkeyTier:
    return ValkeyTier(parse_tier(url, "tier"))


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Open tiers, closed at the end."""
    yield from each_opened(tier_of)


def raw(server: ValkeyServer) -> "library.Valkey":
    """Lends a client of another library, which is somebody else's code."""
    return library.Valkey(host="127.0.0.1", port=server.port)


class TestOverTcp(TierSuite):
    @pytest.fixture(autouse=True)
    def storage(self, server: ValkeyServer) -> None:
        self.url = f"{server.url}?prefix=test{next(_numbers)}:"

    def make_tier(self) -> Tier:
        return tier_of(self.url)

    def make_away(self) -> Tier:
        return tier_of(f"valkey://127.0.0.1:{free_port()}/0")


class TestOverUnixSocket(TestOverTcp):
    @pytest.fixture(autouse=True)
    def storage(self, server: ValkeyServer) -> None:
        self.url = f"valkey+unix://{server.socket}?db=1&prefix=test*[{next(_numbers)}]:"


class TestOverTls(TestOverTcp):
    @pytest.fixture(autouse=True)
    def storage(self, server: ValkeyServer, tls: "Relay") -> None:
        self.url = (
            f"rediss://localhost:{tls.port}/2?prefix=test{next(_numbers)}:&ca={tls.certificate}"
        )


class TestEncoded(TestOverTcp):
    """Every record is compressed and encrypted on its way."""

    encoded = True

    @pytest.fixture(autouse=True)
    def storage(self, server: ValkeyServer, tmp_path: Path) -> None:
        key = key_file(tmp_path / "tier.key", 1)
        self.url = f"{server.url}?prefix=test{next(_numbers)}:&codec=zplanes&key=file:{key}"

    def make_tier(self) -> Tier:
        return make_tier(parse_tier(self.url, "tier"), "here")


# What is in the server


def test_a_value_is_the_record_and_its_name_can_be_read(server: ValkeyServer, make: Make) -> None:
    tier, sample = make(server.url), make_sample(1)
    tier.put([sample.write_request(cut=2)])
    with raw(server) as client:
        assert client.get(f"hybridkv:1:{sample.key.hex()}") == bytes(sample.memory)
    tier.discard([sample.key])


def test_a_value_of_another_length_is_damaged(server: ValkeyServer, make: Make) -> None:
    tier = make(f"{server.url}?prefix=length:")
    with raw(server) as client:

        def change(sample: SampleObject, value: bytes | None) -> None:
            name = f"length:{sample.key.hex()}"
            if value is None:
                client.delete(name)
            else:
                client.set(name, value)

        samples = assert_other_lengths_are_damaged(tier, change)
    assert tier.find([sample.key for sample in samples]) == [True, True, True, False, True]


def test_what_is_not_ours_is_left_alone(server: ValkeyServer, make: Make) -> None:
    tier, sample, sound_sample = (
        make(f"{server.url}?prefix=foreign:"),
        make_sample(1),
        make_sample(2),
    )
    with raw(server) as client:
        client.rpush(f"foreign:{sample.key.hex()}", "a list")
        client.set("foreign:short", "x")
        client.set(f"foreign:{'Z' * len(sample.key.hex())}", "x")
        assert isinstance(read(tier, sample), DamagedError)
        assert tier.put([sound_sample.write_request()]) == [None]
        assert sorted(tier.keys()) == sorted([sample.key, sound_sample.key])
        tier.discard([sample.key], damaged=True)
        assert isinstance(read(tier, sample), MissingError)
        assert tier.put([sample.write_request()]) == [None]
        assert read(tier, sample) is None
        assert client.get("foreign:short") == b"x"


def test_many_in_one_call(
    server: ValkeyServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one round trip, by bytes and by commands."""
    monkeypatch.setattr(module, "FLIGHT_COMMANDS_MAX", 7)
    monkeypatch.setattr(module, "FLIGHT_BYTES_MAX", 100_000)
    tier = make(f"{server.url}?prefix=many:")
    samples = assert_many_in_one_call(tier, 60)
    tier.discard([sample.key for sample in samples])
    assert list(tier.keys()) == []


# Room


def test_what_was_found_before_the_time_is_over_is_found(
    server: ValkeyServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLIGHT_COMMANDS_MAX", 4)
    tier, samples = make(f"{server.url}?prefix=cut:"), [make_sample(number) for number in range(10)]
    assert tier.put([sample.write_request() for sample in samples]) == [None] * 10
    connection, given = ConnectionPool.connection, itertools.count(1)

    def connected(pool: ConnectionPool, deadline: Deadline) -> Any:
        if next(given) > flights:
            raise TierError("no answer in time")
        return connection(pool, deadline)

    monkeypatch.setattr(ConnectionPool, "connection", connected)
    flights = 2
    assert tier.find([sample.key for sample in samples]) == [True] * 8 + [None] * 2
    flights = 0
    with pytest.raises(TierError, match="no answer in time"):
        tier.find([sample.key for sample in samples])


def test_a_full_server_is_full_and_still_answers(tmp_path: Path, make: Make) -> None:
    with ValkeyServer(
        tmp_path, "--maxmemory", "24mb", "--maxmemory-policy", "noeviction"
    ) as server:
        tier = make(server.url)
        samples = [make_sample(number, 1 << 20, 1) for number in range(30)]
        errors = tier.put([sample.write_request() for sample in samples])
        assert errors[0] is None
        assert isinstance(errors[-1], FullError)
        assert errors[-1].refusal is Refusal.MEMORY
        assert {type(error) for error in errors} == {type(None), FullError}
        assert read(tier, samples[0]) is None
        tier.tend()
        assert tier.gauges()["bytes_max"] == 24 << 20
        assert tier.gauges()["objects"] == errors.count(None)
        tier.discard([sample.key for sample in samples])
        assert tier.put([samples[-1].write_request()]) == [None]


# Servers that are gone, hung, or back again


def all_calls(tier: ValkeyTier) -> dict[str, Callable[[], object]]:
    return calls(tier) | {"tend": tier.tend}


@pytest.mark.soak
def test_a_killed_server_is_an_error_until_it_is_back(own_server: ValkeyServer, make: Make) -> None:
    tier, sample = make(own_server.url), make_sample(1)
    assert tier.put([sample.write_request()]) == [None]
    own_server.kill()
    assert_each_fails(all_calls(tier), SLACK_SECONDS)
    own_server.start()
    tier.tend()
    assert isinstance(read(tier, sample), MissingError)
    assert tier.put([sample.write_request()]) == [None]
    assert read(tier, sample) is None


@pytest.mark.soak
def test_a_stopped_server_keeps_nobody_waiting(own_server: ValkeyServer, make: Make) -> None:
    tier = make(f"{own_server.url}?timeout=0.3")
    big = make_sample(3, 8 << 20, 2)  # more than fits into the socket
    assert_keeps_nobody_waiting(tier, own_server, all_calls(tier), [big])


def test_a_server_that_trickles_keeps_nobody_waiting(make: Make) -> None:
    """Every receive brings a byte in time, but never the last one."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                while not ended.wait(0.02):
                    connection.sendall(b"+")

        thread = threading.Thread(target=serve)
        thread.start()
        tier = tier_of(f"valkey://127.0.0.1:{listening.getsockname()[1]}/0?timeout=0.3")
        start = time.monotonic()
        with pytest.raises(TierError):
            tier.open()
        assert time.monotonic() - start < 0.3 + SLACK_SECONDS
        ended.set()
        thread.join(DEADLINE_SECONDS)
        tier.close()


def test_closing_wakes_who_waits(own_server: ValkeyServer) -> None:
    @contextlib.contextmanager
    def sending(started: threading.Event) -> Iterator[None]:
        send = RespConnection.send_all

        def sent(connection: RespConnection, *arguments: Any) -> None:
            send(connection, *arguments)
            started.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RespConnection, "send_all", sent)
            yield

    tier = tier_of(f"{own_server.url}?timeout=60")
    assert_closing_wakes(tier, own_server, sending)


# What was settled when it was opened, and is no longer so


@contextlib.contextmanager
def pair(tmp_path: Path) -> Iterator[list[ValkeyServer]]:
    """Two servers."""
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    with ValkeyServer(places[0]) as first, ValkeyServer(places[1]) as second:
        yield [first, second]


@pytest.mark.parametrize("is_gone", [False, True], ids=["replica", "gone"])
def test_a_failover_is_followed(tmp_path: Path, make: Make, is_gone: bool) -> None:
    """The address leads to another server. Connections to the old one stay open, or break.

    A server that became a replica answers READONLY on an open connection, and loses no record.
    """
    with pair(tmp_path) as (old, new):
        address = tmp_path / "valkey.sock"
        address.symlink_to(old.socket)
        tier, samples = make(f"valkey+unix://{address}?db=0"), [make_sample(n) for n in range(3)]
        assert tier.put([samples[0].write_request()]) == [None]
        if is_gone:
            old.kill()
        else:
            with raw(old) as client:
                client.replicaof("127.0.0.1", new.port)
        address.unlink()
        address.symlink_to(new.socket)
        assert tier.put([sample.write_request() for sample in samples[1:]]) == [None, None]
        with raw(new) as client:
            assert all(client.exists(f"hybridkv:1:{sample.key.hex()}") for sample in samples[1:])


def test_a_server_that_stays_a_replica_refuses(tmp_path: Path, make: Make) -> None:
    with pair(tmp_path) as (old, new):
        tier, sample = make(old.url), make_sample(1)
        with raw(old) as client:
            client.replicaof("127.0.0.1", new.port)
        (error,) = tier.put([sample.write_request()])
        assert error is not None
        assert error.refusal is Refusal.READ_ONLY


def test_a_password_that_is_rotated_in_its_file_is_used(
    guarded: ValkeyServer, tmp_path: Path
) -> None:
    """A new connection is refused once, and the file is read again: no call fails."""
    file = tmp_path / "password"
    file.write_text("open/#?@:%\n")
    url = f"valkey://127.0.0.1:{guarded.port}/0?password_file={file}"
    node = Node(url, make=ValkeyTier)
    engine(node.daemon, 1, FULL)
    node.store_if_room(FULL, [1])
    with library.Valkey(host="127.0.0.1", port=guarded.port, password="open/#?@:%") as client:
        assert client.dbsize()
        client.flushall()
        client.config_set("requirepass", "second")
        client.client_kill_filter(_type="normal", skipme=True)
    file.write_text("second")
    for number in range(2, 12):
        node.store_if_room(FULL, [number])
        node.tick(1.0)
        node.work()
    with library.Valkey(host="127.0.0.1", port=guarded.port, password="second") as client:
        assert client.dbsize()
    assert node.daemon.tiers[0].counters["failures"] == 0
    assert node.daemon.tiers[0].counters["times_reopened"] == 0
    node.daemon.tiers[0].tier.close()


# Settings that can never work


def sentence(url: str) -> str:
    with pytest.raises(ConfigError) as caught:
        tier_of(url).open()
    text = str(caught.value)
    assert " works" in text
    assert "\n" not in text
    for secret in ("qzx", "jwv"):
        assert secret not in text
    return text


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path, "--requirepass", "open/#?@:%") as running:
        with library.Valkey(host="127.0.0.1", port=running.port, password="open/#?@:%") as client:
            client.acl_setuser(
                "reader",
                enabled=True,
                passwords=["+qzxjwv"],
                categories=["+@read", "-@dangerous"],
                keys=["*"],
            )
        yield running


def test_a_wrong_password_is_told_and_not_printed(guarded: ValkeyServer, make: Make) -> None:
    place = f"127.0.0.1:{guarded.port}/0"
    assert "wants a password" in sentence(f"valkey://{place}")
    assert "refuses this user or password" in sentence(f"valkey://:qzxjwv@{place}")
    assert "refuses this user or password" in sentence(f"valkey://who:qzxjwv@{place}")
    assert "GET SET" in sentence(f"valkey://reader:qzxjwv@{place}")
    tier = make(f"valkey://:open%2F%23%3F%40%3A%25@{place}")
    assert read(tier, make_sample(1)) is not None
    assert "qzxjwv" not in repr(tier_of(f"valkey://:qzxjwv@{place}").__dict__)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("valkey://127.0.0.1:none/0", "names no server"),
        ("valkey://:99999999/0", "names no server"),
        ("valkey:///0", "names no server"),
        ("valkey+unix://x@?db=0", "names no server"),
        ("valkey://user@127.0.0.1/0", "without a password"),
        ("valkey://user:qzx/jwv@127.0.0.1/0", "%2F"),
        ("valkey://user:qzx#jwv@127.0.0.1/0", "%23"),
        ("valkey://user:qzxjwv@127.0.0.1:port/0", "%2F"),
        ("valkey://:qzxjwv@127.0.0.1/first", "is no number"),
        ("valkey://:qzxjwv@127.0.0.1/0?prefix=", "prefix is empty"),
    ],
)
def test_a_url_that_cannot_work(url: str, words: str) -> None:
    assert words in sentence(url)


def test_another_protocol_is_a_wrong_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        assert "no Valkey or Redis server" in sentence(
            f"valkey://:qzxjwv@127.0.0.1:{listening.getsockname()[1]}/0"
        )
        thread.join(DEADLINE_SECONDS)


# TLS: a relay in front of the server, whose build need not have it


class Relay:
    """Ends TLS and passes the bytes on."""

    def __init__(self, place: Path, target: int, like: "Relay | None" = None) -> None:
        """It has the certificate of the relay `like`, or one of its own in `place`."""
        self.certificate, self._key = place / "certificate.pem", place / "key.pem"
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if like is None:
            self.renew_certificate()
        else:
            self.certificate, self.context = like.certificate, like.context
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def renew_certificate(self) -> None:
        """Have another certificate, of another authority, in the same file."""
        _write_certificate(self.certificate, self._key)
        self.context.load_cert_chain(self.certificate, self._key)

    def close(self) -> None:
        """Close the server, after every client has closed."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listening.accept()
            except OSError:
                return
            self._start(lambda plain=plain: self._relay(plain))  # type: ignore[misc]

    def _relay(self, plain: socket.socket) -> None:
        plain.settimeout(DEADLINE_SECONDS)
        try:
            client = self.context.wrap_socket(plain, server_side=True)
        except OSError:
            plain.close()
            return
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            # One thread for both ways, since two may not use one TLS connection at once.
            client.settimeout(0)
            server.settimeout(0)
            _pump(client, server)


def _pump(client: ssl.SSLSocket, server: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ)
        selector.register(server, selectors.EVENT_READ)
        while True:
            selector.select()
            for source, sink in ((client, server), (server, client)):
                while True:
                    try:
                        data = source.recv(1 << 16)
                    except (ssl.SSLWantReadError, BlockingIOError):
                        break
                    except OSError:
                        return
                    if not data:
                        return
                    sink.settimeout(DEADLINE_SECONDS)
                    try:
                        sink.sendall(data)
                    except OSError:
                        return
                    sink.settimeout(0)


def _write_certificate(certificate: Path, key: Path) -> None:
    """A certificate for localhost that signs itself."""
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


@pytest.fixture(scope="module")
def tls(server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    relay = Relay(tmp_path_factory.mktemp("tls"), server.port)
    yield relay
    relay.close()


def test_a_server_killed_in_the_middle_of_a_call(own_server: ValkeyServer, make: Make) -> None:
    tier = make(own_server.url)
    assert_survives_a_kill(tier, own_server, 8, back=tier.tend)


def test_settings_that_the_server_refuses(server: ValkeyServer, tls: "Relay") -> None:
    assert "database 99" in sentence(f"valkey://127.0.0.1:{server.port}/99")
    assert "ca=" in sentence(f"valkeys://localhost:{tls.port}/0")
    assert "ca=" in sentence(
        f"valkeys://127.0.0.1:{tls.port}/0?ca={tls.certificate}"
    )  # the name is another
    assert "ca=" in sentence(f"valkeys://localhost:{tls.port}/0?ca=/nowhere.pem")
