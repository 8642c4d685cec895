"""What is told of a request: every group's part in it, in words."""

from hybridkv.connector.story import tell
from hybridkv.core.keys import HASH_BYTES
from hybridkv.wire.messages import Found
from tests.layouts import LAYOUTS

GEMMA3 = LAYOUTS["gemma3"]
ASKED = bytes(4 * HASH_BYTES)


def test_each_group_is_told_of_and_the_one_that_lacks_something_is_named() -> None:
    """A29: no group speaks for the others; B35, B36: a disagreement is the least of them, and says whose."""
    masks = [b"\1\1\1\1", b"\1\1\1\0", b"\1\1\1\1"]
    found = Found(1, 1, 3, masks, b"", b"", {"disk": 2}, "")
    told = tell(GEMMA3, 600, ASKED, found, 128, (256, 4096), 2, "")
    assert told["found"] == (
        "a hit of 3 chunks; objects there: group 0 (sliding) 4 of 4, group 1 (sliding) 3 of 4, group 2 (full) 4 of 4"
    )
    assert told["not more because"] == "group 1 (sliding) lacks chunk 3"
    assert told["came up"] == "2 chunks from disk"
    assert told["loaded"] == "256 tokens, 4KiB"
    assert told["stored"] == "2 objects"


def test_a_miss_says_why() -> None:
    told = tell(GEMMA3, 600, b"", None, None, (0, 0), 0, "no daemon was connected")
    assert told["nothing loaded because"] == "no daemon was connected"
    assert "found" not in told
