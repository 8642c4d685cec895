"""Faults in the compression and encryption of records."""

from tests.mutations.mutation import Mutation

CODING = "tests/unit/tiers/test_coding.py"
ENCRYPTION = "tests/unit/tiers/test_encryption.py"

FAULTS: tuple[Mutation, ...] = (
    Mutation(
        "planes-in-another-order",
        "the planes of a block are put together from the last to the first",
        "_decompress",
        "block[plane::width] =",
        "block[width - 1 - plane::width] =",
        ("B36",),
        (
            f"{CODING}::test_planes_are_as_wide_as_numbers",
            f"{CODING}::test_any_record_comes_back_from_any_pieces",
        ),
    ),
    Mutation(
        "checksum-of-encoded-bytes-only",
        "what was decoded is signed anew, so only the encoded bytes are proven",
        "Coding.decode",
        "zero_after(pieces, payload + record.part_bytes * record.parts)",
        """zero_after(pieces, payload + record.part_bytes * record.parts)
slots = importlib.import_module("hybridkv.shm.slots")
whole = memoryview(bytearray(b"".join(pieces)))
slots.sign(whole, slots.part_digests(whole, *record.shape), record.seed)
write_header(record, whole)
scatter(pieces, 0, whole)""",
        ("B36",),
        (f"{CODING}::test_other_bytes_in_a_sound_body_are_damaged",),
    ),
    Mutation(
        "no-associated-data",
        "the header of an encrypted record is not authenticated with its body",
        "associated_data",
        "return header",
        'return b""',
        ("B36",),
        (f"{ENCRYPTION}::test_a_body_under_another_name_is_damaged",),
    ),
)
