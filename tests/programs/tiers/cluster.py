"""A real Valkey cluster on the loopback, which an independent client makes and changes."""

from pathlib import Path
from typing import Any

import valkey as library

from hybridkv.tiers.valkey.slots import SLOTS
from tests.programs.tiers.servers import ValkeyServer, free_port
from tests.waiting import until

NODE_TIMEOUT_MS = 2000  # With less, a busy machine is taken for a dead node.
MIGRATE_MS = 5000
MIGRATE_KEYS = 50


class ClusterNode(ValkeyServer):
    """One server of a cluster."""

    def __init__(self, place: Path, *arguments: str) -> None:
        place.mkdir(parents=True)
        self.bus_port = free_port()
        super().__init__(
            place,
            *("--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)),
            *("--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
            *("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"),
            *arguments,
        )

    def client(self) -> "library.Valkey":
        """Returns a client of this node alone, which follows no redirect."""
        return library.Valkey(host="127.0.0.1", port=self.port)

    def call(self, *words: object) -> Any:
        """Returns the answer to one command."""
        with self.client() as client:
            return client.execute_command(*words)

    @property
    def name(self) -> str:
        """The node's name in its cluster."""
        answer = self.call("CLUSTER", "MYID")
        assert isinstance(answer, bytes)
        return answer.decode()

    def says(self, line: bytes) -> bool:
        """Returns whether CLUSTER INFO has this line."""
        answer = self.call("CLUSTER INFO")
        if isinstance(answer, dict):
            name, _, value = line.decode().partition(":")
            return str(answer.get(name)) == value
        assert isinstance(answer, bytes)
        return line in answer.split()


class ValkeyCluster:
    """Primaries with an equal share of the slots each, and replicas."""

    def __init__(self, place: Path, primaries: int = 3, replicas: int = 0) -> None:
        """The first `replicas` primaries have a replica each."""
        self.nodes = [
            ClusterNode(place / f"node{number}") for number in range(primaries + replicas)
        ]
        self.primaries = self.nodes[:primaries]
        self.replicas = self.nodes[primaries:]

    def __enter__(self) -> "ValkeyCluster":
        try:
            for node in self.nodes:
                node.start()
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()

    def url(self, options: str = "") -> str:
        """Returns the URL of a tier that names one node."""
        return f"{self.primaries[0].url}?timeout=5{options}"

    def owner(self, slot: int) -> int:
        """Returns the number of the primary that has had a slot since the start."""
        return slot * len(self.primaries) // SLOTS

    def wait_until_ok(self) -> None:
        """Wait until every node says that the cluster is well."""
        until(lambda: all(node.says(b"cluster_state:ok") for node in self.nodes), "it is well")

    def _join(self) -> None:
        count = len(self.primaries)
        for number, node in enumerate(self.primaries):
            # The owner of slot s is s * count // SLOTS.
            start, end = (-(-SLOTS * edge // count) for edge in (number, number + 1))
            node.call("CLUSTER", "ADDSLOTSRANGE", start, end - 1)
            node.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            self.nodes[0].call("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus_port)
        known = f"cluster_known_nodes:{len(self.nodes)}".encode()
        until(lambda: all(node.says(known) for node in self.nodes), "nodes know each other")
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            replica.call("CLUSTER", "REPLICATE", primary.name)
        self.wait_until_ok()
        until(lambda: all(map(_is_linked, self.replicas)), "replicas have their primary's data")

    def move_slot(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        """Move a slot with its records, as `valkey-cli --cluster reshard` does."""
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source.name)
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target.name)
        while names := source.call("CLUSTER", "GETKEYSINSLOT", slot, MIGRATE_KEYS):
            assert isinstance(names, list)
            words = ("MIGRATE", "127.0.0.1", target.port, "", 0, MIGRATE_MS, "REPLACE", "KEYS")
            source.call(*words, *names)
        for node in (target, source):
            node.call("CLUSTER", "SETSLOT", slot, "NODE", target.name)


def _is_linked(replica: ClusterNode) -> bool:
    with replica.client() as client:
        return bool(client.info("replication").get("master_link_status") == "up")
