"""Faults in the daemon, the tiers below RAM, and MultiConnector."""

from tests.mutations.changes import always, body, never, swap, without
from tests.mutations.mutation import Mutation

HANDLERS = "tests/unit/daemon/test_handlers.py"
MULTI = "tests/unit/multi/test_multi.py"
MULTI_STATISTICS = "tests/unit/multi/test_statistics.py"
RANKING = "tests/unit/multi/test_ranking.py"
STOP = "tests/programs/cli/test_arenas.py"
TIERS = "tests/unit/daemon/test_tiers.py"
LIARS = "tests.daemonsim --seeds 0:30 --faults liar"
BRUTE_FORCE = f"{MULTI}::test_the_choice_is_that_of_a_brute_force_scorer"

FAULTS: tuple[Mutation, ...] = (
    Mutation(
        "any-version",
        "a client of another protocol version is welcome",
        "Daemon._hello",
        never("PROTOCOL_VERSION"),
        "A4",
        (f"{HANDLERS}::test_greetings_that_are_refused",),
    ),
    Mutation(
        "everybody-may-say-everything",
        "no message is refused for who says it",
        "refused",
        body("return None"),
        "C42",
        (f"{HANDLERS}::test_who_may_say_what",),
    ),
    Mutation(
        "broken-frames-go-on",
        "a client whose frames are broken is served on",
        "ClientSockets._refuse",
        without("is_closing"),
        "C42",
        (LIARS,),
    ),
    Mutation(
        "lease-without-pins",
        "what a lease names may be evicted",
        "Daemon._answer_lookup",
        without("store.pin"),
        "C16 C42",
        (f"{HANDLERS}::test_credits_are_bounded_and_objects_under_a_lease_stay",),
    ),
    Mutation(
        "credits-without-bound",
        "one session may have the whole arena in unwritten slots",
        "slot_requests:reserve",
        swap("SESSION_SHARE", "1"),
        "B40",
        (f"{HANDLERS}::test_credits_are_bounded_and_objects_under_a_lease_stay",),
    ),
    Mutation(
        "old-bytes-win",
        "what a failed load read stays, whatever is stored",
        "Store.commit",
        always("replace_on_store"),
        "B36",
        (f"{HANDLERS}::test_what_a_failed_load_read_is_replaced_by_what_is_stored_next",),
    ),
    Mutation(
        "answers-are-prompts",
        "answers that nobody reads evict prompts",
        "EvictionQueue.victim",
        never("_has_many_answers"),
        "C42",
        ("tests/unit/store/test_store.py::test_answers_that_nobody_reads_evict_no_prompt",),
    ),
    Mutation(
        "tiers-are-believed-for-ever",
        "a router goes on hearing of what a tier below RAM has lost",
        "Subscriptions._look_below",
        always("_is_below"),
        "C13",
        (
            "tests/unit/daemon/test_subscriptions.py::"
            "test_what_a_directory_has_is_told_and_told_again_when_it_has_it_no_more",
        ),
    ),
    Mutation(
        "what-is-gone-is-announced",
        "a router hears of chunks that RAM and tiers have lost",
        "Subscriptions._presence",
        body("return b'\\1' * len(subscriber.namespace.gids)"),
        "C13",
        (
            "tests/unit/daemon/test_announcements.py::"
            "test_what_a_directory_has_is_announced_as_being_below",
        ),
    ),
    # Processes and arenas
    Mutation(
        "any-arena-fits",
        "an arena of another version is taken over",
        "_take_over",
        never("version"),
        "A4",
        (
            "tests/programs/daemon/test_upgrade.py::"
            "test_the_cache_goes_on_where_the_arena_is_of_one_version",
        ),
    ),
    Mutation(
        "arena-in-the-usual-directory",
        "--shm-dir is not where the arena is made",
        "open_arena",
        body("return original(**{**arguments, 'directory': SHM_DIR})"),
        "C15",
        ("tests/programs/daemon/test_shm_dir.py::test_the_arena_is_there_and_nowhere_else",),
    ),
    Mutation(
        "arena-in-use-removed",
        "a daemon removes the arena that another one uses",
        "filesystem:_takes_lock",
        body("""
            original(fd)
            return True
        """),
        "C15",
        (f"{STOP}::test_arenas_are_listed_and_those_that_no_daemon_has_are_removed",),
    ),
    Mutation(
        "daemon-is-a-child",
        "the daemon that an engine starts is its child, which vLLM kills with it",
        "_detach",
        swap("os.fork()", "0"),
        "C15",
        ("tests/engine/test_detached.py::test_vllm_kills_its_engines_process_tree",),
    ),
    Mutation(
        "foreign-worker-ends-with-its-connection",
        "slots of a worker of another pid namespace are free while it may write into them",
        "Sessions.on_disconnect",
        always("is_locked"),
        "B38",
        ("tests/programs/daemon/test_elsewhere.py::test_its_slots_are_kept_until_it_ends",),
    ),
    # Tiers
    Mutation(
        "reads-at-any-price",
        "a tier is read also where computing is faster",
        "best_load",
        body("return original(**{**arguments, 'token_seconds': 0.0})"),
        "D18",
        (
            "tests/unit/tiers/test_load_or_compute.py::"
            "test_the_best_cut_is_when_the_prompt_is_ready_first",
        ),
    ),
    Mutation(
        "deadline-of-nobody",
        "a lookup waits for tiers until they answer",
        "Promotion.tick",
        never("deadline"),
        "B39 D6",
        (f"{TIERS}::test_at_the_deadline_the_answer_is_what_ram_has",),
    ),
    Mutation(
        "files-unproven",
        "a record from a tier is taken for whole",
        "proven_digests",
        body("return part_digests(memory, record.part_bytes, record.parts)"),
        "B36",
        (f"{TIERS}::test_a_damaged_object_is_a_miss_and_put_aside",),
    ),
    Mutation(
        "no-associated-data",
        "the header of an encrypted record is not authenticated with its body",
        "associated_data",
        body("return b''"),
        "B36",
        ("tests/unit/tiers/test_encryption.py::test_a_body_under_another_name_is_damaged",),
    ),
    # MultiConnector
    Mutation(
        "first-hit-wins",
        "whoever has a hit and stands first is loaded from",
        "decide",
        body("""
            first = next((answer for answer in answers if answer.tokens), None)
            kept = [answer if answer is first else ChildAnswer(0) for answer in answers]
            return original(kept if first else answers, weights, most_tokens, times)
        """),
        "B19 B20 D19",
        (f"{RANKING}::test_a_faster_child_wins_unless_the_other_has_much_more", BRUTE_FORCE),
    ),
    Mutation(
        "grace-without-end",
        "a hit in hand waits for a better one for as long as it takes",
        "decide",
        always("GRACE_SECONDS"),
        "B21",
        (BRUTE_FORCE,),
    ),
    Mutation(
        "preempted-unheard",
        "no child hears of preempted requests",
        "MultiWorker.handle_preemptions",
        body("pass"),
        "B23 D14",
        (f"{MULTI}::test_both_signatures_of_handle_preemptions",),
    ),
    Mutation(
        "an-impossible-hit-is-taken",
        "a child may offer more than the prompt has",
        "MultiScheduler._ask.ask",
        never("most_tokens"),
        "B30",
        (f"{MULTI}::test_an_impossible_answer_is_a_miss",),
    ),
    Mutation(
        "statistics-raise",
        "a child's error in its statistics ends the engine's loop or the server's",
        "attempt",
        body("return work()"),
        "B30",
        (f"{MULTI_STATISTICS}::test_statistics_never_raise",),
    ),
)
