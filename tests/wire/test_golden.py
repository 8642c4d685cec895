"""The exact bytes of one example of every message: whoever changes the format by accident sees it here.

Examples name their fields, so that another order of fields is seen too.
"""

from typing import get_args

import pytest

from hybridkv.core.geometry import Kind
from hybridkv.wire.codec import Frames, decode_reply, decode_request, encode
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Abandon,
    Clear,
    Commit,
    Condemn,
    Describe,
    Done,
    Drained,
    Engines,
    Error,
    Explain,
    Explained,
    Found,
    Granted,
    Hello,
    Identify,
    ListEngines,
    Lookup,
    Pending,
    Release,
    Removed,
    Reply,
    Report,
    Request,
    Stats,
    Tell,
    Want,
    Watch,
    Welcome,
    WireEngine,
    WireGeometry,
    WireGroup,
    WireModel,
)

NAME = bytes(range(32))
OFFSETS = bytes(range(16))
GENERATIONS = bytes(range(16, 32))
GEOMETRY = WireGeometry(
    groups=[
        WireGroup(
            gid=0,
            kind=Kind.FULL,
            tokens_per_block=16,
            block_bytes=4096,
            window_tokens=0,
            extra_retained_tokens=0,
            replicated=True,
        ),
        WireGroup(
            gid=1,
            kind=Kind.SLIDING,
            tokens_per_block=32,
            block_bytes=1 << 33,
            window_tokens=1024,
            extra_retained_tokens=7,
            replicated=False,
        ),
    ],
    chunk_tokens=128,
    alignment_tokens=32,
    hash_tokens=16,
    ranks=2,
)
MODEL = WireModel(
    name="model",
    max_model_len=4096,
    kv_dtype="auto (bfloat16)",
    layers=[4, 28],
    retention_tokens=None,
    step_tokens=2048,
)

REQUESTS: list[tuple[Request, str]] = [
    (
        Hello(
            id=1,
            version=1,
            role="engine",
            engine_id="engine-0",
            namespace=NAME,
            geometry=GEOMETRY,
            model=MODEL,
            session=3,
        ),
        "8b00000099a568656c6c6f0101a6656e67696e65a8656e67696e652d30c420000102030405060708090a0b0c0d0e0f1011121314"
        "15161718191a1b1c1d1e1f95929700a466756c6c10cd10000000c39701a7736c6964696e6720cf0000000200000000cd040007c2"
        "cc8020100296a56d6f64656ccd1000af6175746f202862666c6f617431362992041cc0cd080003",
    ),
    (
        Hello(id=1, version=1, role="worker", engine_id="engine-0"),
        "1d00000099a568656c6c6f0101a6776f726b6572a8656e67696e652d30c0c0c000",
    ),
    (
        Hello(id=1, version=1, role="control"),
        "1600000099a568656c6c6f0101a7636f6e74726f6ca0c0c0c000",
    ),
    (
        Drained(session=3),
        "0a00000092a7647261696e656403",
    ),
    (
        Identify(id=2, namespace=NAME),
        "2d00000093a86964656e7469667902c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    (
        Watch(),
        "0700000091a57761746368",
    ),
    (
        Lookup(id=3, lease=9, hashes=NAME + NAME, wait_ms=2000, tokens_per_second=10_000),
        "5200000096a66c6f6f6b75700309c440000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00010203"
        "0405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcd07d0cd2710",
    ),
    (
        Release(lease=9, tokens=256, loaded_bytes=1 << 20, failed=True),
        "1300000095a772656c6561736509cd0100ce00100000c3",
    ),
    (
        Want(id=4, part_bytes=8192, parts=2, count=64),
        "0c00000095a477616e7404cd20000240",
    ),
    (
        Commit(
            offsets=OFFSETS,
            generations=GENERATIONS,
            groups=bytes(16),
            hashes=NAME + NAME,
            tokens=256,
            parents=bytes(32) + NAME,
            interior=b"\1\0",
            tenants=OFFSETS,
        ),
        "db00000099a6636f6d6d6974c410000102030405060708090a0b0c0d0e0fc410101112131415161718191a1b1c1d1e1fc4100000"
        "0000000000000000000000000000c440000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00010203"
        "0405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcd0100c44000000000000000000000000000000000000000"
        "00000000000000000000000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4020100c41000"
        "0102030405060708090a0b0c0d0e0f",
    ),
    (
        Abandon(offsets=OFFSETS, generations=GENERATIONS),
        "2d00000093a76162616e646f6ec410000102030405060708090a0b0c0d0e0fc410101112131415161718191a1b1c1d1e1f",
    ),
    (
        Condemn(offsets=OFFSETS, generations=GENERATIONS),
        "2d00000093a7636f6e64656d6ec410000102030405060708090a0b0c0d0e0fc410101112131415161718191a1b1c1d1e1f",
    ),
    (
        Tell(request_id="cmpl-1", facts={"stored": "2 chunks"}),
        "1e00000093a474656c6ca6636d706c2d3181a673746f726564a832206368756e6b73",
    ),
    (
        Describe(facts={"dtype": "bfloat16"}),
        "1a00000092a8646573637269626581a56474797065a862666c6f61743136",
    ),
    (
        Explain(id=5, request_id="cmpl-1"),
        "1100000093a76578706c61696e05a6636d706c2d31",
    ),
    (
        Stats(id=6),
        "0900000093a5737461747306c2",
    ),
    (
        ListEngines(id=7),
        "0f00000092ac6c6973745f656e67696e657307",
    ),
    (
        Clear(id=8, tiers=True),
        "0900000093a5636c65617208c3",
    ),
]

REPLIES: list[tuple[Reply, str]] = [
    (
        Welcome(
            id=1,
            version=1,
            boot="b" * 32,
            arena_path="/dev/shm/arena",
            arena_bytes=1 << 30,
            slots_bytes=1 << 29,
            pid=4711,
        ),
        "4900000098a777656c636f6d650101d9206262626262626262626262626262626262626262626262626262626262626262ae2f64"
        "65762f73686d2f6172656e61ce40000000ce20000000cd1267",
    ),
    (
        Found(
            id=3,
            lease=9,
            chunks=1,
            masks=[b"\1\0", b"\1\1"],
            offsets=OFFSETS,
            generations=GENERATIONS,
            tiers={"disk": 1},
            why="w",
        ),
        "4000000099a5666f756e6403090192c4020100c4020101c410000102030405060708090a0b0c0d0e0fc410101112131415161718"
        "191a1b1c1d1e1f81a46469736b01a177",
    ),
    (
        Pending(id=3, lease=9, wait_ms=2000, chunks=2, masks=[b"\1\0", b"\1\1"]),
        "1800000096a770656e64696e670309cd07d00292c4020100c4020101",
    ),
    (
        Granted(id=4, part_bytes=8192, parts=2, offsets=OFFSETS, generations=GENERATIONS, reserved_bytes=1 << 28),
        "3700000097a76772616e74656404cd200002c410000102030405060708090a0b0c0d0e0fc410101112131415161718191a1b1c1d"
        "1e1fce10000000",
    ),
    (
        Removed(id=0, hashes=NAME + NAME, groups=b"\0\1", everything=True),
        "5100000095a772656d6f76656400c440000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00010203"
        "0405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4020001c3",
    ),
    (
        Report(id=6, values={"objects": 3.0}, info={"boot": "b"}),
        "2300000094a67265706f72740681a76f626a65637473cb400800000000000081a4626f6f74a162",
    ),
    (
        Engines(
            id=7,
            engines=[
                WireEngine(engine_id="engine-0", namespace=NAME, geometry=GEOMETRY, model=MODEL),
                WireEngine(engine_id="engine-1", namespace=NAME, geometry=GEOMETRY, model=None),
            ],
        ),
        "e100000093a7656e67696e6573079294a8656e67696e652d30c420000102030405060708090a0b0c0d0e0f101112131415161718"
        "191a1b1c1d1e1f95929700a466756c6c10cd10000000c39701a7736c6964696e6720cf0000000200000000cd040007c2cc802010"
        "0296a56d6f64656ccd1000af6175746f202862666c6f617431362992041cc0cd080094a8656e67696e652d31c420000102030405"
        "060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f95929700a466756c6c10cd10000000c39701a7736c6964696e67"
        "20cf0000000200000000cd040007c2cc80201002c0",
    ),
    (
        Done(id=8, count=12),
        "0800000093a4646f6e65080c",
    ),
    (
        Explained(id=5, facts={"stored": "2 chunks"}, latest=["cmpl-1", "cmpl-0"]),
        "2c00000094a96578706c61696e65640581a673746f726564a832206368756e6b7392a6636d706c2d31a6636d706c2d30",
    ),
    (
        Error(id=3, code="lease", message="lease 9 is taken"),
        "1f00000094a56572726f7203a56c65617365b06c6561736520392069732074616b656e",
    ),
]


def test_every_message_has_an_example() -> None:
    assert {type(message) for message, _ in REQUESTS} == set(get_args(Request))
    assert {type(message) for message, _ in REPLIES} == set(get_args(Reply))
    assert PROTOCOL_VERSION == 5, "another version has other examples"


@pytest.mark.parametrize(("message", "frame"), [*REQUESTS, *REPLIES], ids=lambda value: type(value).__name__)
def test_the_bytes_on_the_wire_do_not_change_by_accident(message: Request | Reply, frame: str) -> None:
    assert encode(message).hex() == frame


@pytest.mark.parametrize(("message", "frame"), REQUESTS, ids=lambda value: type(value).__name__)
def test_the_bytes_are_read_as_the_same_request(message: Request, frame: str) -> None:
    (body,) = Frames().feed(bytes.fromhex(frame))
    assert decode_request(body) == message


@pytest.mark.parametrize(("message", "frame"), REPLIES, ids=lambda value: type(value).__name__)
def test_the_bytes_are_read_as_the_same_reply(message: Reply, frame: str) -> None:
    (body,) = Frames().feed(bytes.fromhex(frame))
    assert decode_reply(body) == message


def test_stats_of_an_older_client_is_read() -> None:
    (body,) = Frames().feed(bytes.fromhex("0800000092a5737461747306"))
    assert decode_request(body) == Stats(id=6, status=False)
