"""Records in a real Valkey cluster: its nodes die, hang, and give their slots to others."""

import contextlib
import itertools
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.tiers.conformance.samples import SampleObject, make_sample, read
from hybridkv.tiers.conformance.suite import TierSuite
from hybridkv.tiers.contract import MissingError, Tier, TierError
from hybridkv.tiers.valkey.servers import UnservedError, UnservedReadError
from hybridkv.tiers.valkey.slots import slot_of
from hybridkv.tiers.valkey.tier import ValkeyTier
from tests.documents import DOCS
from tests.programs.tiers.cluster import ClusterNode, ValkeyCluster
from tests.programs.tiers.outages import SLACK_SECONDS
from tests.programs.tiers.records import (
    assert_many_in_one_call,
    assert_other_lengths_are_damaged,
    each_opened,
    get_all,
)
from tests.programs.tiers.servers import free_port
from tests.programs.tiers.test_valkey import Relay, tier_of
from tests.waiting import DEADLINE_SECONDS, until

Make = Callable[[str], ValkeyTier]
THREADS = 4
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    with ValkeyCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def make() -> Iterator[Make]:
    """Open tiers, closed at the end."""
    yield from each_opened(tier_of)


def slot(sample: SampleObject, prefix: str = "hybridkv:1:") -> int:
    return slot_of(prefix.encode() + sample.key.hex().encode())


def by_owner(cluster: ValkeyCluster, samples: Sequence[SampleObject]) -> list[list[SampleObject]]:
    """The samples of each primary, with the default prefix."""
    numbers = range(len(cluster.primaries))
    return [[each for each in samples if cluster.owner(slot(each)) == number] for number in numbers]


class TestOverACluster(TierSuite):
    @pytest.fixture(autouse=True)
    def storage(self, cluster: ValkeyCluster) -> None:
        self.url = cluster.url(f"&prefix=test{next(_numbers)}:")

    def make_tier(self) -> Tier:
        return tier_of(self.url)

    def make_away(self) -> Tier:
        return tier_of(f"valkey://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/0")


# Where records are


def test_records_are_spread_over_the_nodes(cluster: ValkeyCluster, make: Make) -> None:
    tier = make(cluster.url("&prefix=spread:"))
    samples = assert_many_in_one_call(tier, 60)
    counts = [node.call("DBSIZE") for node in cluster.primaries]
    assert all(counts)
    tier.tend()
    assert tier.gauges()["objects"] == sum(map(int, map(str, counts)))
    assert "bytes_max" not in tier.gauges()
    tier.discard([sample.key for sample in samples])
    assert list(tier.keys()) == []


def test_there_is_a_bound_if_each_node_has_one(cluster: ValkeyCluster, make: Make) -> None:
    tier = make(cluster.url("&prefix=bound:"))
    for node in cluster.primaries:
        assert "bytes_max" not in tier.gauges()
        node.call("CONFIG", "SET", "maxmemory", 64 << 20)
        tier.tend()
    assert tier.gauges()["bytes_max"] == 3 * 64 << 20
    assert tier.gauges()["bytes"] > 3 << 20
    for node in cluster.primaries:
        node.call("CONFIG", "SET", "maxmemory", 0)


def test_a_prefix_with_a_hash_tag_keeps_all_records_in_one_slot(
    cluster: ValkeyCluster, make: Make
) -> None:
    tier = make(cluster.url("&prefix={kv}:"))
    samples = assert_many_in_one_call(tier, 12)
    (there,) = {slot(sample, "{kv}:") for sample in samples}
    node = cluster.primaries[cluster.owner(there)]
    assert node.call("CLUSTER", "COUNTKEYSINSLOT", there) == 8
    tier.discard([sample.key for sample in samples])


def test_a_value_of_another_length_is_damaged(cluster: ValkeyCluster, make: Make) -> None:
    tier = make(cluster.url("&prefix=length:"))

    def change(sample: SampleObject, value: bytes | None) -> None:
        node = cluster.primaries[cluster.owner(slot(sample, "length:"))]
        name = f"length:{sample.key.hex()}"
        node.call("DEL", name) if value is None else node.call("SET", name, value)

    samples = assert_other_lengths_are_damaged(tier, change)
    tier.discard([sample.key for sample in samples])


def test_the_first_node_that_answers_tells_of_the_others(
    cluster: ValkeyCluster, make: Make
) -> None:
    ports = [free_port(), free_port(), cluster.primaries[2].port]
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    tier = make(f"valkey://{hosts}/0?prefix=seeds:")
    samples = [make_sample(number) for number in range(12)]
    assert tier.put([sample.write_request() for sample in samples]) == [None] * 12
    tier.discard([sample.key for sample in samples])


def test_a_unix_socket_leads_to_no_cluster(cluster: ValkeyCluster) -> None:
    tier = tier_of(f"valkey+unix://{cluster.nodes[0].socket}")
    with pytest.raises(ConfigError, match="reached over TCP"):
        tier.open()
    tier.close()


# Slots that move


def keep_slot(cluster: ValkeyCluster, sample: SampleObject) -> tuple[int, ClusterNode, ClusterNode]:
    """The slot of a record, its node, and another one."""
    there = slot(sample)
    number = cluster.owner(there)
    return there, cluster.primaries[number], cluster.primaries[number - 1]


def test_a_slot_that_moved_is_found_where_it_is_now(cluster: ValkeyCluster, make: Make) -> None:
    tier, sample = make(cluster.url()), make_sample(1)
    there, source, target = keep_slot(cluster, sample)
    assert tier.put([sample.write_request()]) == [None]
    for old, new in ((source, target), (target, source)):
        cluster.move_slot(there, old, new)
        assert tier.find([sample.key]) == [True]
        assert read(tier, sample) is None
        assert tier.put([sample.write_request()]) == [None]
        assert new.call("CLUSTER", "COUNTKEYSINSLOT", there) == 1
    tier.discard([sample.key])


def test_a_slot_that_is_moving_is_asked_for_on_both_sides(
    cluster: ValkeyCluster, make: Make
) -> None:
    tier, sample = make(cluster.url()), make_sample(2)
    there, source, target = keep_slot(cluster, sample)
    target.call("CLUSTER", "SETSLOT", there, "IMPORTING", source.name)
    source.call("CLUSTER", "SETSLOT", there, "MIGRATING", target.name)
    try:
        assert isinstance(read(tier, sample), MissingError)
        assert tier.put([sample.write_request()]) == [None]
        assert read(tier, sample) is None
        assert tier.find([sample.key]) == [True]
        counts = [node.call("CLUSTER", "COUNTKEYSINSLOT", there) for node in (source, target)]
        assert counts == [0, 1], "a new record goes to the node that gets the slot"
        tier.discard([sample.key])
        assert isinstance(read(tier, sample), MissingError)
    finally:
        for node in (source, target):
            node.call("CLUSTER", "SETSLOT", there, "STABLE")


# Logins


def page_permissions() -> list[str]:
    """The commands that docs/tiers.md names for a user of a cluster, as rules of an ACL."""
    text = (DOCS / "tiers.md").read_text()
    server = re.search(r"needs the commands\s+`([A-Z ]+)`", text)
    of_clusters = re.search(r"of a cluster also\s+`([A-Z| ]+)`", text)
    assert server
    assert of_clusters
    return [f"+{word.lower()}" for word in (*server[1].split(), *of_clusters[1].split())]


def set_user(cluster: ValkeyCluster, password: str, rules: Sequence[str]) -> None:
    for node in cluster.nodes:
        words = ("cache", "reset", "on", f">{password}", "~hybridkv:1:*", *rules)
        node.call("ACL", "SETUSER", *words)


def test_a_user_needs_what_the_page_says(cluster: ValkeyCluster, make: Make) -> None:
    rules = page_permissions()
    set_user(cluster, "first", rules)
    url = f"valkey://cache:first@127.0.0.1:{cluster.nodes[0].port}/0"
    tier, samples = make(url), [make_sample(number) for number in range(12)]
    assert tier.put([sample.write_request() for sample in samples]) == [None] * 12
    assert [read(tier, sample) for sample in samples] == [None] * 12
    assert not any(isinstance(start, TierError) for start in tier.read_starts([samples[0].key]))
    assert len(list(tier.keys())) == 12
    tier.tend()
    assert tier.erase([sample.key for sample in samples]) == [None] * 12
    for lacking in ("+asking", "+cluster|slots", "+info", "+exists", "+select"):
        set_user(cluster, "first", [rule for rule in rules if rule != lacking])
        refused = tier_of(url)
        with pytest.raises(ConfigError, match=r"CLUSTER\|SLOTS ASKING"):
            refused.open()
        refused.close()


def test_a_password_that_ends_is_read_again_for_a_new_connection(
    cluster: ValkeyCluster, make: Make, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    rules = page_permissions()
    set_user(cluster, "first", rules)
    place = f"127.0.0.1:{cluster.nodes[0].port}/0"
    tier = make(f"valkey://cache@{place}?password_file={file}")
    samples = [make_sample(number) for number in range(12)]
    set_user(cluster, "second", rules)
    for node in cluster.nodes:
        node.call("CLIENT", "KILL", "USER", "cache")
    assert any(tier.put([sample.write_request() for sample in samples])), "the file is late"
    file.write_text("second\n")
    assert tier.put([sample.write_request() for sample in samples]) == [None] * 12
    assert [read(tier, sample) for sample in samples] == [None] * 12
    tier.discard([sample.key for sample in samples])


def test_nodes_with_tls_go_by_the_names_that_they_announce(tmp_path: Path, make: Make) -> None:
    """A relay before each node, because the server's build need not have TLS."""
    cluster = ValkeyCluster(tmp_path)
    with contextlib.ExitStack() as stack:
        first = None
        for node in cluster.nodes:
            relay = Relay(node.place, node.port, first)
            first = first or relay
            stack.callback(relay.close)
            node.arguments += (
                *("--cluster-announce-port", str(relay.port)),
                *("--cluster-announce-hostname", "localhost"),
                *("--cluster-preferred-endpoint-type", "hostname"),
            )
        assert first is not None
        stack.enter_context(cluster)
        tier = make(f"valkeys://localhost:{first.port}/0?ca={first.certificate}")
        stack.callback(tier.close)
        samples = assert_many_in_one_call(tier, 12)
        assert samples
        assert all(node.call("DBSIZE") for node in cluster.primaries)


# Nodes that are gone or hang


def test_a_dead_node_costs_its_own_records_alone(tmp_path: Path, make: Make) -> None:
    with ValkeyCluster(tmp_path) as cluster:
        tier = make(cluster.url())
        samples = [make_sample(number) for number in range(18)]
        assert tier.put([sample.write_request() for sample in samples]) == [None] * 18
        lost, *others = by_owner(cluster, samples)
        kept = [sample for group in others for sample in group]
        assert lost
        assert kept
        cluster.primaries[0].kill()
        for _ in range(4):  # At first it is asked, and then it is left alone.
            assert tier.find([sample.key for sample in samples]) == [
                None if sample in lost else True for sample in samples
            ]
            errors, _ = get_all(tier, samples)
            kinds = [UnservedReadError if sample in lost else type(None) for sample in samples]
            assert [type(error) for error in errors] == kinds
            assert tier.put([sample.write_request() for sample in kept]) == [None] * len(kept)
            assert tier.find([sample.key for sample in lost]) == [None] * len(lost)
            (error,) = tier.put([lost[0].write_request()])
            assert type(error) is UnservedError, "which is tried again, as no missing one would be"
            tier.tend()
        with pytest.raises(TierError):
            list(tier.keys())
        with pytest.raises(TierError):
            tier.erase([lost[0].key])
        starts = tier.read_starts([sample.key for sample in lost])
        assert {type(start) for start in starts} == {UnservedError}, "nobody says that they went"
        with pytest.MonkeyPatch.context() as patch:  # The node dies after it has removed them.
            patch.setattr(tier, "discard", lambda keys: None)
            proofs = tier.erase([sample.key for sample in lost])
        assert {type(proof) for proof in proofs} == {UnservedError}
        cluster.nodes = cluster.nodes[1:]
        ports = [node.port for node in cluster.nodes]
        second = make(f"valkey://127.0.0.1:{cluster.primaries[0].port},127.0.0.1:{ports[0]}/0")
        assert second.find([sample.key for sample in samples]) == [
            None if sample in lost else True for sample in samples
        ]
        for node in cluster.nodes:
            node.kill()
        for _ in range(4):
            errors, _ = get_all(tier, samples)
        assert {type(error) for error in errors} == {TierError}, "now the tier fails"
        with pytest.raises(TierError):
            tier.find([sample.key for sample in samples])
        with pytest.raises(TierError):
            tier.tend()


@pytest.mark.soak
def test_a_hanging_node_costs_its_own_records_and_no_call_its_deadline(
    tmp_path: Path, make: Make
) -> None:
    with ValkeyCluster(tmp_path) as cluster:
        tier = make(f"{cluster.primaries[1].url}?timeout=1")
        samples = [make_sample(number) for number in range(18)]
        assert tier.put([sample.write_request() for sample in samples]) == [None] * 18
        lost = by_owner(cluster, samples)[0]
        keys, expected = [each.key for each in samples], [each not in lost for each in samples]
        cluster.primaries[0].send(signal.SIGSTOP)
        for _ in range(4):
            start = time.monotonic()
            assert tier.find(keys) == expected
            assert time.monotonic() - start < 1 + SLACK_SECONDS
        start = time.monotonic()
        for _ in range(20):
            assert tier.find(keys) == expected
            errors, _ = get_all(tier, samples)
            assert [error is None for error in errors] == expected
        print(f"20 finds and gets without the node took {time.monotonic() - start:.3f} s")
        cluster.primaries[0].send(signal.SIGCONT)

        def is_back() -> bool:
            tier.tend()
            return tier.find(keys) == [True] * 18

        until(is_back, "the node is asked again")


def owners(node: ClusterNode) -> list[int]:
    """The ports of the primaries, as a node knows them."""
    return [primary[1] for _, _, primary, *_ in node.call("CLUSTER SLOTS")]


@pytest.mark.soak
@pytest.mark.parametrize("how", ["killed", "stopped", "asked"])
def test_the_replica_that_takes_over_is_asked(tmp_path: Path, make: Make, how: str) -> None:
    with ValkeyCluster(tmp_path, replicas=1) as cluster:
        tier = make(f"{cluster.primaries[1].url}?timeout=1")
        samples = [make_sample(number) for number in range(18)]
        assert tier.put([sample.write_request() for sample in samples]) == [None] * 18
        primary, replica = cluster.primaries[0], cluster.replicas[0]
        until(lambda: replica.call("DBSIZE") == primary.call("DBSIZE"), "the replica has it all")
        if how == "killed":
            primary.kill()
        elif how == "stopped":
            primary.send(signal.SIGSTOP)
        replica.call("CLUSTER", "FAILOVER", *([] if how == "asked" else ["TAKEOVER"]))

        for node in cluster.primaries[1:]:
            until(lambda: replica.port in owners(node), "all know of it")  # noqa: B023

        def is_found() -> bool:
            if how == "stopped":  # Else the first call reads the map by itself.
                tier.tend()
            return tier.find([sample.key for sample in samples]) == [True] * 18

        start = time.monotonic()
        until(is_found, "everything is found again")
        print(f"{how}: everything is found again after {time.monotonic() - start:.3f} s")
        assert tier.put([sample.write_request() for sample in samples]) == [None] * 18
        assert [read(tier, sample) for sample in samples] == [None] * 18
        primary.send(signal.SIGCONT) if how == "stopped" else None


@pytest.mark.soak
def test_slots_that_move_under_load_cost_nothing(cluster: ValkeyCluster, make: Make) -> None:
    tier, over = make(cluster.url("&prefix=load:")), threading.Event()
    samples = [make_sample(number, 60_000) for number in range(60)]
    faults: list[BaseException] = []
    longest = [0.0] * THREADS
    calls = itertools.count()
    errors: list[TierError] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            while not over.is_set():
                chosen, start = rng.sample(samples, 8), time.monotonic()
                if rng.random() < 0.3:
                    errors.extend(filter(None, tier.put([one.write_request() for one in chosen])))
                elif rng.random() < 0.5:
                    assert tier.find([one.key for one in chosen]) == [True] * 8
                else:
                    errors.extend(filter(None, (read(tier, one) for one in chosen)))
                longest[number] = max(longest[number], time.monotonic() - start)
                next(calls)
        except BaseException as error:  # noqa: BLE001  # raised by the test's own thread
            faults.append(error)

    assert tier.put([sample.write_request() for sample in samples]) == [None] * len(samples)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    moved = sorted({slot(sample, "load:") for sample in samples})
    for there in moved:
        source = cluster.primaries[cluster.owner(there)]
        cluster.move_slot(there, source, cluster.primaries[cluster.owner(there) - 1])
    for there in moved:
        target = cluster.primaries[cluster.owner(there)]
        cluster.move_slot(there, cluster.primaries[cluster.owner(there) - 1], target)
    over.set()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    print(f"{2 * len(moved)} moves, {next(calls)} calls, longest {max(longest):.3f} s, {errors}")
    for fault in faults:
        raise fault
    assert errors == []
    assert max(longest) < 5 + SLACK_SECONDS
    tier.discard([sample.key for sample in samples])
