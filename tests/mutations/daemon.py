"""Faults in the protocol, the daemon and its tiers."""

from tests.mutations.files import CODEC, GOLDEN, HANDLERS, TIERS
from tests.mutations.mutation import Mutation

FAULTS: tuple[Mutation, ...] = (
    # The protocol, the daemon and its tiers
    # The daemon's files
    Mutation(
        "socket-not-made-again",
        "a socket that was removed under the daemon stays away",
        "ServedSocket.restored",
        "",
        "return None",
        ("C15",),
        ("tests/programs/daemon/test_files.py::test_what_is_removed_under_a_daemon_is_made_again",),
    ),
    Mutation(
        "arena-in-use-removed",
        "a daemon removes the arena that another one uses",
        "_claimed",
        "yield _takes_lock(fd)",
        "yield _takes_lock(fd) or True",
        ("C15",),
        (
            "tests/programs/daemon/test_files.py"
            "::test_of_two_daemons_the_one_whose_place_was_taken_ends",
            "tests/programs/cli/test_arenas.py"
            "::test_arenas_are_listed_and_those_that_no_daemon_has_are_removed",
        ),
    ),
    Mutation(
        "stop-does-not-wait",
        "hybridkv stop returns while the daemon still runs",
        "end_process",
        "return bool(select.select([process], [], [], END_SECONDS)[0])",
        "return True",
        ("C15",),
        ("tests/programs/cli/test_arenas.py::test_stop_keeps_the_memory_for_the_next_daemon",),
    ),
    Mutation(
        "stop-free-keeps",
        "hybridkv stop --free leaves the memory and the socket of a daemon that was killed",
        "free_left",
        "remove_unused_arenas(socket_path)",
        "pass",
        ("C15",),
        ("tests/programs/cli/test_arenas.py::test_stop_where_there_is_no_daemon",),
    ),
    Mutation(
        "removed-arena-taken-over",
        "a daemon takes over an arena that somebody removed meanwhile",
        "attach_arena",
        "if not os.fstat(fd).st_nlink:",
        "if False:",
        ("C15",),
        ("tests/unit/shm/test_arena.py::test_an_arena_removed_meanwhile_is_not_taken_over",),
    ),
    Mutation(
        "hints-get-lost",
        "a group's window does not reach the daemon",
        "geometry_to_wire",
        "getattr(group, name) for name in WireGroup.__struct_fields__",
        """
        0 if name == "window_tokens" else getattr(group, name)
        for name in WireGroup.__struct_fields__
        """,
        ("A14",),
        (f"{CODEC}::test_geometry_crosses_the_wire",),
    ),
    Mutation(
        "other-bytes-on-the-wire",
        "messages are maps and not arrays",
        "_Message",
        'class _Message(Struct, frozen=True, array_like=True, tag_field="type"):',
        'class _Message(Struct, frozen=True, array_like=False, tag_field="type"):',
        ("A28", "D17"),
        (f"{GOLDEN}::test_the_bytes_on_the_wire_do_not_change_by_accident",),
    ),
    Mutation(
        "any-version",
        "a client of another protocol version is welcome",
        "Daemon._hello",
        "if hello.version != PROTOCOL_VERSION:",
        "if hello.version < 0:",
        ("A4",),
        (f"{HANDLERS}::test_greetings_that_are_refused",),
    ),
    Mutation(
        "masks-of-the-first-group",
        "every group is said to have what the first one has",
        "Namespace.present",
        "bytes([entry is not None and entry[index] is not None for entry in entries])",
        "bytes([entry is not None and entry[0] is not None for entry in entries])",
        ("A27", "B13"),
        (f"{HANDLERS}::test_a_hit_needs_every_group_at_one_boundary",),
    ),
    Mutation(
        "lease-without-pins",
        "what a lease names may be evicted",
        "Daemon._found",
        "self.store.pin(slots)",
        "",
        ("C16", "C42"),
        (f"{HANDLERS}::test_credits_are_bounded_and_objects_under_a_lease_stay",),
    ),
    Mutation(
        "credits-without-bound",
        "one session may have the whole arena in unwritten slots",
        "slot_requests:reserve",
        "state.info.slots_bytes // SESSION_SHARE - session.writing_bytes",
        "state.info.slots_bytes",
        ("B40",),
        (f"{HANDLERS}::test_credits_are_bounded_and_objects_under_a_lease_stay",),
    ),
    Mutation(
        "everybody-may-say-everything",
        "no message is refused for who says it",
        "refused",
        "if state in RULES[message].states:",
        "if message in RULES:",
        ("C42",),
        (f"{HANDLERS}::test_who_may_say_what",),
    ),
    Mutation(
        "deadline-of-nobody",
        "a lookup waits for tiers until they answer",
        "Promotion.tick",
        "if lookup.request.deadline <= now and not is_complete:",
        "if lookup.request.deadline < 0 and not is_complete:",
        ("B39", "D6"),
        (f"{TIERS}::test_at_the_deadline_the_answer_is_what_ram_has",),
    ),
    Mutation(
        "slots-given-away-while-read-into",
        "at the deadline the slots that a thread still writes into are free",
        "Promotion._end",
        "self._leave(lookup)",
        """
        self._leave(lookup)
        for read in self._reads.values():
            self._store.free(read.slot)
        """,
        ("D6",),
        (f"{TIERS}::test_at_the_deadline_the_answer_is_what_ram_has",),
    ),
    Mutation(
        "files-unproven",
        "a record from a tier is taken for whole",
        "_prove",
        "if digests is None:",
        "if not record.size_bytes:",
        ("B36",),
        (f"{TIERS}::test_a_damaged_object_is_a_miss_and_put_aside",),
    ),
)
