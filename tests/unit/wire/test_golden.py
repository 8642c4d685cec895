"""The exact bytes of one example of every message: a change of the format by accident is seen.

Examples name their fields, so that another order of fields is seen too.
"""

from typing import NamedTuple, get_args

import pytest

from hybridkv.core.audit import AuditOutcome
from hybridkv.core.geometry import GroupKind
from hybridkv.core.hints import Hints
from hybridkv.core.policies import Advice
from hybridkv.core.refusals import Refusal
from hybridkv.core.selection import HeldObject
from hybridkv.wire.codec import Frames, decode_reply, decode_request, encode
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Advise,
    Announced,
    AuditOffer,
    Clear,
    Commit,
    Computed,
    Computing,
    Decline,
    Describe,
    Done,
    Drained,
    Engines,
    Error,
    Explain,
    Explained,
    Forget,
    Forgotten,
    Found,
    Free,
    GroupPresence,
    Hello,
    Identify,
    IdentityDifference,
    ListEngines,
    ListObjects,
    Lookup,
    ObjectPage,
    OtherIdentity,
    Pending,
    Pin,
    Pinned,
    Prefetch,
    Prefetching,
    PrefetchState,
    PrefetchStatus,
    QuotaReport,
    ReadAnnouncements,
    ReadPrefetches,
    ReadQuotas,
    Release,
    Removed,
    Reply,
    Report,
    ReportAudit,
    ReportCorrupt,
    ReportIdentity,
    ReportMapping,
    ReportRequest,
    ReportStale,
    Request,
    RequestExplanation,
    Reserve,
    Reserved,
    RetainedBytes,
    SetQuota,
    StartPrefetch,
    Stats,
    Subscribe,
    TenantQuota,
    Welcome,
    WireEngine,
    WireGeometry,
    WireGroup,
    WireModel,
    WirePin,
)
from hybridkv.wire.status import (
    DaemonSetup,
    DecisionStatus,
    GroupStatus,
    MemoryVerdict,
    Outcome,
    Problem,
    SessionStatus,
    Status,
    StatusHistory,
    TierRefusal,
    TierStatus,
    WindowStatus,
)

NAME = bytes(range(32))
SLOTS = bytes(range(32))
TENANTS = bytes(range(16))
GEOMETRY = WireGeometry(
    groups=[
        WireGroup(
            gid=0,
            kind=GroupKind.FULL,
            tokens_per_block=16,
            block_bytes=4096,
            window_tokens=0,
            extra_retained_tokens=0,
            replicated=True,
        ),
        WireGroup(
            gid=1,
            kind=GroupKind.SLIDING,
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
    stages=2,
)
MODEL = WireModel(
    name="model",
    max_model_len=4096,
    kv_dtype="auto (bfloat16)",
    layers=[4, 28],
    retention_tokens=None,
    step_tokens=2048,
    keeps_junctions=True,
)
EXPLANATION = RequestExplanation(
    prompt_tokens=600,
    stored_objects=2,
    chunk_tokens=128,
    asked_chunks=4,
    first_chunk=NAME,
    hit_chunks=3,
    looked_chunks=4,
    groups=[
        GroupPresence(gid=0, kind=GroupKind.FULL, objects=4, lacks=None),
        GroupPresence(gid=1, kind=GroupKind.SLIDING, objects=3, lacks=3),
    ],
    tiers={"disk": 2},
    not_read="it was not read in time",
    local_tokens=128,
    loaded_tokens=256,
    loaded_bytes=1 << 20,
    declined=Decline.LOAD_FAILED,
    detail="d",
    audit=AuditOutcome.DIFFERED,
    audit_detail="a",
    junctions=[256],
    last_chunk=NAME,
    hints=Hints(writes=False, retain_seconds=600.0, prefetch_in_seconds=20.0),
)
TIER = TierStatus(
    name="disk",
    location="disk:///d",
    write="through",
    max_bytes=1 << 30,
    is_open=True,
    is_shut=False,
    is_hung=False,
    values={"bytes": 5.0},
    refusals=[TierRefusal(reason=Refusal.NO_SPACE, seconds=90.0)],
)
WINDOW = WindowStatus(
    seconds=60.0,
    hit=0.5,
    ceiling=None,
    hit_tokens=2.0,
    asked_tokens=4.0,
    loaded_tokens=1.0,
    saved_seconds=None,
    wait_seconds=None,
    per_second={"lookups": 1.0},
)
PAST = StatusHistory(
    step_seconds=10.0,
    ages=[0.0],
    hit=[None],
    ceiling=[1.0],
    lookups=[1.0],
    wait_seconds=[None],
    evicted=[0.0],
    loaded=[0.0],
    stored=[0.0],
    sessions=[1.0],
    bytes={"ram": [0.0]},
    read={},
    written={},
)
STATUS = Status(
    version="0",
    setup=DaemonSetup(host="h", socket_path="/s", settings={"ram": "1GiB"}),
    uptime_seconds=1.0,
    values={"objects": 3.0},
    minute=WINDOW,
    recent=WINDOW,
    health=[Problem(level="note", text="t")],
    help="h",
    verdict=MemoryVerdict(hit=0.5, ceiling=None, text="v"),
    tiers=[TIER],
    groups=[GroupStatus(identity="i", model="m", gid=0, kind="full", objects=1, held_bytes=2)],
    sessions=[
        SessionStatus(
            engine_id="e",
            model="m",
            identity="i",
            chunk_tokens=128,
            groups="0:full/16",
            leases=1,
            writing_bytes=2,
            is_connected=True,
            since=3.0,
        )
    ],
    decisions=[
        DecisionStatus(
            request_id="r",
            identity="i",
            age=1.0,
            prompt="600 tokens",
            outcome=Outcome.LOADED,
            text="x",
            limit="y",
            facts={"prompt": "600 tokens"},
        )
    ],
    hour=PAST,
)


class Example(NamedTuple):
    """A message, and the bytes of its frame in hexadecimal digits."""

    message: Request | Reply
    frame: str


REQUESTS = [
    Example(
        Hello(
            id=1,
            version=1,
            role="engine",
            engine_id="engine-0",
            namespace=NAME,
            geometry=GEOMETRY,
            model=MODEL,
            session=3,
            is_producer=True,
        ),
        "8f0000009ba568656c6c6f0101a6656e67696e65a8656e67696e652d30c420000102030405060708090a"
        "0b0c0d0e0f101112131415161718191a1b1c1d1e1f96929700a466756c6c10cd10000000c39701a7736c"
        "6964696e6720cf0000000200000000cd040007c2cc802010020297a56d6f64656ccd1000af6175746f20"
        "2862666c6f617431362992041cc0cd0800c30300c3",
    ),
    Example(
        Hello(id=1, version=1, role="worker", engine_id="engine-0", lock=(1 << 61) + 5),
        "270000009ba568656c6c6f0101a6776f726b6572a8656e67696e652d30c0c0c000cf2000000000000005c2",
    ),
    Example(
        Hello(id=1, version=1, role="control"),
        "180000009ba568656c6c6f0101a7636f6e74726f6ca0c0c0c00000c2",
    ),
    Example(Drained(session=3), "0a00000092a7647261696e656403"),
    Example(ReportMapping(is_mapped=False), "1100000092ae7265706f72745f6d617070696e67c2"),
    Example(ReportStale(is_stale=True, unread=3), "1000000093ac7265706f72745f7374616c65c303"),
    Example(
        Identify(id=2, namespace=NAME),
        "2d00000093a86964656e7469667902c420000102030405060708090a0b0c0d0e0f101112131415161718"
        "191a1b1c1d1e1f",
    ),
    Example(Subscribe(), "0b00000091a9737562736372696265"),
    Example(
        Describe(hashes=NAME, parents=bytes(32), descriptions=[b"d"]),
        "5200000094a86465736372696265c420000102030405060708090a0b0c0d0e0f10111213141516171819"
        "1a1b1c1d1e1fc420000000000000000000000000000000000000000000000000000000000000000091c4"
        "0164",
    ),
    Example(
        ReadAnnouncements(number=7, description_bytes=1 << 15),
        "1800000093b2726561645f616e6e6f756e63656d656e747307cd8000",
    ),
    Example(
        Lookup(
            id=3,
            lease=9,
            hashes=NAME + NAME,
            wait_ms=2000,
            tokens_per_second=10_000,
            tails=NAME,
            tails_from=2,
            audit_lease=10,
            promises=True,
            computed_elsewhere=True,
            is_scan=True,
        ),
        "790000009ca66c6f6f6b75700309c440000102030405060708090a0b0c0d0e0f10111213141516171819"
        "1a1b1c1d1e1f000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcd07d0cd"
        "2710c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f020ac3c3c3",
    ),
    Example(
        Release(lease=9, tokens=256, loaded_bytes=1 << 20, failed=True, unused=True),
        "1400000096a772656c6561736509cd0100ce00100000c3c3",
    ),
    Example(Computing(lease=9), "0c00000092a9636f6d707574696e6709"),
    Example(Computed(lease=9), "0b00000092a8636f6d707574656409"),
    Example(
        Advise(advice=Advice.RETAIN, hashes=NAME, tenant=(1 << 64) - 1, ttl_ms=600_000),
        "3f00000095a6616476697365a672657461696ec420000102030405060708090a0b0c0d0e0f1011121314"
        "15161718191a1b1c1d1e1fcfffffffffffffffffce000927c0",
    ),
    Example(
        Prefetch(hashes=NAME, in_ms=20_000, tails=NAME, tails_from=1),
        "5200000095a87072656665746368c420000102030405060708090a0b0c0d0e0f10111213141516171819"
        "1a1b1c1d1e1fcd4e20c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e"
        "1f01",
    ),
    Example(
        Reserve(id=4, part_bytes=8192, parts=2, count=64), "0f00000095a77265736572766504cd20000240"
    ),
    Example(
        Commit(
            slots=SLOTS,
            groups=bytes(16),
            hashes=NAME + NAME,
            tokens=256,
            parents=bytes(32) + NAME,
            classes=b"\1\2",
            tenants=TENANTS,
        ),
        "d900000098a6636f6d6d6974c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b"
        "1c1d1e1fc41000000000000000000000000000000000c440000102030405060708090a0b0c0d0e0f1011"
        "12131415161718191a1b1c1d1e1f000102030405060708090a0b0c0d0e0f101112131415161718191a1b"
        "1c1d1e1fcd0100c440000000000000000000000000000000000000000000000000000000000000000000"
        "0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4020102c4100001020304"
        "05060708090a0b0c0d0e0f",
    ),
    Example(
        Free(slots=SLOTS),
        "2800000092a466726565c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    Example(
        ReportCorrupt(slots=SLOTS),
        "3200000092ae7265706f72745f636f7272757074c420000102030405060708090a0b0c0d0e0f10111213"
        "1415161718191a1b1c1d1e1f",
    ),
    Example(
        ReportRequest(request_id="cmpl-1", explanation=EXPLANATION),
        "dc00000093ae7265706f72745f72657175657374a6636d706c2d31dc0014cd025802cc8004c420000102"
        "030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f0304929400a466756c6c04c094"
        "01a7736c6964696e67030381a46469736b02b7697420776173206e6f74207265616420696e2074696d65"
        "cc80cd0100ce00100000ac6c6f6164735f6661696c6564a164a86469666665726564a16191cd0100c420"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f97c3c2cb4082c0000000"
        "0000c2c2c2cb4034000000000000",
    ),
    Example(
        ReportIdentity(facts={"dtype": "bfloat16"}),
        "2100000092af7265706f72745f6964656e7469747981a56474797065a862666c6f61743136",
    ),
    Example(
        ReportAudit(request_id="cmpl-1", outcome=AuditOutcome.PASSED, detail="d"),
        "1e00000094ac7265706f72745f6175646974a6636d706c2d31a6706173736564a164",
    ),
    Example(Explain(id=5, request_id="cmpl-1"), "1100000093a76578706c61696e05a6636d706c2d31"),
    Example(
        StartPrefetch(id=5, request_id="cmpl-1", family=b"\1", in_ms=500),
        "1e00000095ae73746172745f707265666574636805a6636d706c2d31c40101cd01f4",
    ),
    Example(
        ReadPrefetches(id=5, numbers=[1, 300]),
        "1700000093af726561645f70726566657463686573059201cd012c",
    ),
    Example(Stats(id=6), "0a00000094a5737461747306c2c3"),
    Example(ListEngines(id=7), "0f00000092ac6c6973745f656e67696e657307"),
    Example(
        Pin(id=8, ttl_ms=1, request_id="r", identity="ab", tenant=7),
        "0d00000096a370696e0801a172a2616207",
    ),
    Example(Clear(id=8, tiers=True), "0900000093a5636c65617208c3"),
    Example(
        Forget(id=9, place=1, keys=NAME + NAME + b"\0\1", rest=True),
        "4f00000095a6666f726765740901c442000102030405060708090a0b0c0d0e0f10111213141516171819"
        "1a1b1c1d1e1f000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f0001c3",
    ),
    Example(ReadQuotas(id=9), "0e00000092ab726561645f71756f74617309"),
    Example(
        SetQuota(id=9, tenant=(1 << 64) - 1, bound_bytes=4096, is_default=True),
        "1900000095a97365745f71756f746109cfffffffffffffffffcd1000c3",
    ),
    Example(ListObjects(id=9, place=1, cursor=2), "1100000094ac6c6973745f6f626a65637473090102"),
]

REPLIES = [
    Example(
        Welcome(
            id=1,
            version=1,
            boot="b" * 32,
            arena_path="/dev/shm/arena",
            arena_bytes=1 << 30,
            slots_bytes=1 << 29,
            pid=4711,
        ),
        "4900000098a777656c636f6d650101d92062626262626262626262626262626262626262626262626262"
        "62626262626262ae2f6465762f73686d2f6172656e61ce40000000ce20000000cd1267",
    ),
    Example(
        Found(
            id=3,
            lease=9,
            depth=1,
            masks=[b"\1\0", b"\1\1"],
            slots=SLOTS,
            tiers={"disk": 1},
            why="w",
            tail=5,
            audit=AuditOffer(lease=10, chunk=0, slots=SLOTS, shorter_slots=SLOTS),
            junctions=[5],
            promised=True,
        ),
        "890000009ca5666f756e6403090192c4020100c4020101c420000102030405060708090a0b0c0d0e0f10"
        "1112131415161718191a1b1c1d1e1f81a46469736b01a17705940a00c420000102030405060708090a0b"
        "0c0d0e0f101112131415161718191a1b1c1d1e1fc420000102030405060708090a0b0c0d0e0f10111213"
        "1415161718191a1b1c1d1e1f9105c3",
    ),
    Example(
        Pending(id=3, lease=9, wait_ms=2000, depth=2, masks=[b"\1\0", b"\1\1"]),
        "1800000096a770656e64696e670309cd07d00292c4020100c4020101",
    ),
    Example(
        Reserved(id=4, part_bytes=8192, parts=2, slots=SLOTS, reserved_bytes=1 << 28),
        "3600000096a8726573657276656404cd200002c420000102030405060708090a0b0c0d0e0f1011121314"
        "15161718191a1b1c1d1e1fce10000000",
    ),
    Example(
        Removed(id=0, hashes=NAME + NAME, groups=b"\0\1", everything=True),
        "5300000096a772656d6f76656400c440000102030405060708090a0b0c0d0e0f10111213141516171819"
        "1a1b1c1d1e1f000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4020001"
        "c3c400",
    ),
    Example(
        Announced(
            id=0,
            hashes=NAME,
            parents=bytes(32),
            descriptions=[b"d"],
            masks=[b"\1", b"\2"],
            more=True,
        ),
        "5c00000097a9616e6e6f756e63656400c420000102030405060708090a0b0c0d0e0f1011121314151617"
        "18191a1b1c1d1e1fc4200000000000000000000000000000000000000000000000000000000000000000"
        "91c4016492c40101c40102c3",
    ),
    Example(
        Report(id=6, values={"objects": 3.0}, tiers=[TIER], metrics_url="http://m", status=STATUS),
        "6d05000096a67265706f72740681a76f626a65637473cb40080000000000009189a46e616d65a4646973"
        "6ba86c6f636174696f6ea96469736b3a2f2f2f64a57772697465a77468726f756768a96d61785f627974"
        "6573ce40000000a769735f6f70656ec3a769735f73687574c2a769735f68756e67c2a676616c75657381"
        "a56279746573cb4014000000000000a87265667573616c739182a6726561736f6ea86e6f5f7370616365"
        "a77365636f6e6473cb4056800000000000a8687474703a2f2f6d8ea776657273696f6ea130a573657475"
        "7083a4686f7374a168ab736f636b65745f70617468a22f73a873657474696e677381a372616da4314769"
        "42ae757074696d655f7365636f6e6473cb3ff0000000000000a676616c75657381a76f626a65637473cb"
        "4008000000000000a66d696e75746589a77365636f6e6473cb404e000000000000a3686974cb3fe00000"
        "00000000a76365696c696e67c0aa6869745f746f6b656e73cb4000000000000000ac61736b65645f746f"
        "6b656e73cb4010000000000000ad6c6f616465645f746f6b656e73cb3ff0000000000000ad7361766564"
        "5f7365636f6e6473c0ac776169745f7365636f6e6473c0aa7065725f7365636f6e6481a76c6f6f6b7570"
        "73cb3ff0000000000000a6726563656e7489a77365636f6e6473cb404e000000000000a3686974cb3fe0"
        "000000000000a76365696c696e67c0aa6869745f746f6b656e73cb4000000000000000ac61736b65645f"
        "746f6b656e73cb4010000000000000ad6c6f616465645f746f6b656e73cb3ff0000000000000ad736176"
        "65645f7365636f6e6473c0ac776169745f7365636f6e6473c0aa7065725f7365636f6e6481a76c6f6f6b"
        "757073cb3ff0000000000000a66865616c74689182a56c6576656ca46e6f7465a474657874a174a46865"
        "6c70a168a77665726469637483a3686974cb3fe0000000000000a76365696c696e67c0a474657874a176"
        "a574696572739189a46e616d65a46469736ba86c6f636174696f6ea96469736b3a2f2f2f64a577726974"
        "65a77468726f756768a96d61785f6279746573ce40000000a769735f6f70656ec3a769735f73687574c2"
        "a769735f68756e67c2a676616c75657381a56279746573cb4014000000000000a87265667573616c7391"
        "82a6726561736f6ea86e6f5f7370616365a77365636f6e6473cb4056800000000000a667726f75707391"
        "86a86964656e74697479a169a56d6f64656ca16da367696400a46b696e64a466756c6ca76f626a656374"
        "7301aa68656c645f627974657302a873657373696f6e739189a9656e67696e655f6964a165a56d6f6465"
        "6ca16da86964656e74697479a169ac6368756e6b5f746f6b656e73cc80a667726f757073a9303a66756c"
        "6c2f3136a66c656173657301ad77726974696e675f627974657302ac69735f636f6e6e6563746564c3a5"
        "73696e6365cb4008000000000000a96465636973696f6e739188aa726571756573745f6964a172a86964"
        "656e74697479a169a3616765cb3ff0000000000000a670726f6d7074aa36303020746f6b656e73a76f75"
        "74636f6d65a66c6f61646564a474657874a178a56c696d6974a179a5666163747381a670726f6d7074aa"
        "36303020746f6b656e73a4686f75728dac737465705f7365636f6e6473cb4024000000000000a4616765"
        "7391cb0000000000000000a368697491c0a76365696c696e6791cb3ff0000000000000a76c6f6f6b7570"
        "7391cb3ff0000000000000ac776169745f7365636f6e647391c0a76576696374656491cb000000000000"
        "0000a66c6f6164656491cb0000000000000000a673746f72656491cb0000000000000000a87365737369"
        "6f6e7391cb3ff0000000000000a5627974657381a372616d91cb0000000000000000a47265616480a777"
        "72697474656e80",
    ),
    Example(
        Engines(
            id=7,
            engines=[
                WireEngine(engine_id="engine-0", namespace=NAME, geometry=GEOMETRY, model=MODEL),
                WireEngine(engine_id="engine-1", namespace=NAME, geometry=GEOMETRY, model=None),
            ],
        ),
        "e400000093a7656e67696e6573079294a8656e67696e652d30c420000102030405060708090a0b0c0d0e"
        "0f101112131415161718191a1b1c1d1e1f96929700a466756c6c10cd10000000c39701a7736c6964696e"
        "6720cf0000000200000000cd040007c2cc802010020297a56d6f64656ccd1000af6175746f202862666c"
        "6f617431362992041cc0cd0800c394a8656e67696e652d31c420000102030405060708090a0b0c0d0e0f"
        "101112131415161718191a1b1c1d1e1f96929700a466756c6c10cd10000000c39701a7736c6964696e67"
        "20cf0000000200000000cd040007c2cc8020100202c0",
    ),
    Example(
        Pinned(
            id=8,
            pins=[WirePin(request_id="r", identity="ab", tenant=7, left_ms=1, chunks=3, kept=2)],
            tenants=[RetainedBytes(tenant=7, charged_bytes=5, share_bytes=6)],
            is_busy=True,
        ),
        "1a00000095a670696e6e6564089196a172a26162070103029193070506c3",
    ),
    Example(Done(id=8, count=12), "0800000093a4646f6e65080c"),
    Example(
        Forgotten(
            id=9,
            count=1,
            failed=2,
            error="e",
            pending=3,
            in_use=4,
            wiping_bytes=5,
            unwritten_bytes=6,
        ),
        "1400000099a9666f72676f7474656e090102a16503040506",
    ),
    Example(
        QuotaReport(
            id=9,
            default=None,
            served_default=1,
            quotas=[TenantQuota(tenant=2, bound_bytes=3, held_bytes=4, is_own=True)],
            has_user_tenants=True,
            is_settled=False,
            path="/p",
            error="e",
        ),
        "1800000099a671756f74617309c0019194020304c3c3c2a22f70a165",
    ),
    Example(
        ObjectPage(
            id=9,
            objects=[
                HeldObject(
                    key=NAME,
                    size_bytes=4096,
                    tenant=(1 << 64) - 1,
                    parent=3,
                    written_seconds=1.5,
                    used_seconds=None,
                )
            ],
            cursor=3,
            error="e",
            models={NAME: "m"},
            has_user_tenants=True,
            up_seconds=2.0,
        ),
        "7b00000098ab6f626a6563745f70616765099196c420000102030405060708090a0b0c0d0e0f10111213"
        "1415161718191a1b1c1d1e1fcd1000cfffffffffffffffff03cb3ff8000000000000c003a16581c42000"
        "0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa16dc3cb40000000000000"
        "00",
    ),
    Example(
        Explained(
            id=5,
            latest=["cmpl-1", "cmpl-0"],
            identity=NAME,
            explanation=EXPLANATION,
            others=[
                OtherIdentity(
                    identity=NAME,
                    differences=[IdentityDifference(name="dtype", here="a", there="b")],
                )
            ],
        ),
        "3201000096a96578706c61696e65640592a6636d706c2d31a6636d706c2d30c420000102030405060708"
        "090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fdc0014cd025802cc8004c42000010203040506"
        "0708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f0304929400a466756c6c04c09401a7736c"
        "6964696e67030381a46469736b02b7697420776173206e6f74207265616420696e2074696d65cc80cd01"
        "00ce00100000ac6c6f6164735f6661696c6564a164a86469666665726564a16191cd0100c42000010203"
        "0405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f97c3c2cb4082c00000000000c2c2"
        "c2cb40340000000000009192c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b"
        "1c1d1e1f9193a56474797065a161a162",
    ),
    Example(
        Prefetching(
            id=5,
            prefetches=[
                PrefetchStatus(
                    number=300,
                    state=PrefetchState.READING,
                    tokens=512,
                    hit_tokens=128,
                    objects=3,
                    read_bytes=4096,
                    wait_ms=500,
                )
            ],
            is_known=False,
        ),
        "2800000094ab7072656665746368696e67059197cd012ca772656164696e67cd0200cc8003cd1000cd01f4c2",
    ),
    Example(
        Error(id=3, code="lease", message="lease 9 is taken"),
        "1f00000094a56572726f7203a56c65617365b06c6561736520392069732074616b656e",
    ),
]


def test_every_message_has_an_example() -> None:
    assert {type(message) for message, _ in REQUESTS} == set(get_args(Request))
    assert {type(message) for message, _ in REPLIES} == set(get_args(Reply))
    assert PROTOCOL_VERSION == 14, "another version has other examples"


@pytest.mark.parametrize(
    ("message", "frame"), [*REQUESTS, *REPLIES], ids=lambda value: type(value).__name__
)
def test_the_bytes_on_the_wire_do_not_change_by_accident(
    message: Request | Reply, frame: str
) -> None:
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
