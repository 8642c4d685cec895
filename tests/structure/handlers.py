"""Every `contextlib.suppress` and every catch-all handler of the sources, with its reason.

A test compares this list with the code in both directions.
"""

from typing import NamedTuple

RAISED = "raised again"
NO = "not counted: "
"""Followed by the reason."""


class Handler(NamedTuple):
    """An `except` clause or `suppress` in the sources."""

    function: str
    """The qualified name of the function that contains it, without the module."""
    clause: str
    """Its text, as `suppress(OSError)` or `except Exception`."""
    reason: str
    """Why the handler may catch what it catches."""
    counter: str
    """RAISED, NO with a reason, or what counts it: a counter, its family or the value of its label.

    A `*` at the end stands for what varies.
    """


HANDLERS = (
    # The connector
    Handler(
        "HookGuard.run_hook",
        "except Exception",
        "No fault of a hook may reach the engine, which goes on without the cache.",
        "faults",
    ),
    Handler(
        "SchedulerRole.run_work",
        "except Exception",
        "After a fault of a hook nobody knows what was said to the daemon: it is greeted anew.",
        RAISED,
    ),
    Handler(
        "KVEventPublisher.update",
        "except Exception",
        "A fault of the KV events withdraws what was announced, and costs no lookup or store.",
        "kv_events",
    ),
    Handler(
        "KVEventPublisher._keep_tokens",
        "suppress(TypeError, OverflowError)",
        "Tokens that are no numbers of 32 bits are not kept: the chunk is announced in RAM alone.",
        NO + "a router hears of its removal",
    ),
    Handler(
        "WorkerRole.load_request",
        "except Exception",
        "A load that cannot begin is reported as failed, and the engine computes its tokens.",
        "rank_loads_failed",
    ),
    Handler(
        "EngineWeights._words",
        "except Exception",
        "What a device fails to say of the weights is like nothing else; reports go on.",
        NO + "logged, and nothing is served meanwhile",
    ),
    Handler(
        "Auditor._compare_all",
        "except Exception",
        "What cannot be compared is no reason not to serve; the log has it.",
        "audits",
    ),
    Handler(
        "EngineWeights._look",
        "except Exception",
        "Weights that cannot be looked at are like no others, so no step is taken for another's.",
        NO + "logged, and nothing is served meanwhile",
    ),
    Handler(
        "EngineWeights._end_copies",
        "except Exception",
        "The engine sleeps all the same, and nothing is copied before it is awake.",
        NO + "logged",
    ),
    Handler(
        "module_contents",
        "except Exception",
        "A module of another project may refuse a look at it: the weights have a random identity.",
        NO + "the log has it",
    ),
    Handler(
        "_offloaded_storage",
        "except Exception",
        "An offloader of another class or version keeps weights anywhere, so all are unread.",
        NO + "the log has it",
    ),
    Handler(
        "PackedWeights.matrix_digest",
        "except Exception",
        "A build of vLLM may lack the kernel that multiplies: the weights have a random identity.",
        NO + "the log has it",
    ),
    Handler(
        "_WholeDigest.add_module",
        "except Exception",
        "A tensor of another project's class may refuse to be read: the same.",
        NO + "the log has it",
    ),
    Handler(
        "EngineWeights._digest",
        "except Exception",
        "Weights that cannot be read are like no others, so the engine shares with nobody.",
        NO + "the log has a line, and the start of the engine goes on",
    ),
    Handler(
        "HostCopier._each.run",
        "except Exception",
        "The error is returned to the caller, which fails the object's load or store.",
        "rank_loads_failed",
    ),
    Handler(
        "CopyLane.run_jobs",
        "except Exception",
        "Whatever ends a copy on a device fails all that is queued, and the worker copies no more.",
        "device_failed",
    ),
    Handler(
        "CopyLane._fail_all",
        "except Exception",
        "A device that has failed cannot be waited for, and nobody may wait for its copies.",
        "device_failed",
    ),
    Handler(
        "DeviceContext.enter_thread",
        "except Exception",
        "A thread that has not the device copies nothing, and all that it is given fails.",
        "device_failed",
    ),
    Handler(
        "pinning_lane",
        "except Exception",
        "Memory that is not pinned is copied through a buffer, and whoever waits for it goes on.",
        NO + "the log has it",
    ),
    Handler(
        "CudaDevice.make_kernels",
        "except Exception",
        "Where Triton does not compile or run, torch copies the same bytes.",
        NO + "it happens once, at the start, and the log says it",
    ),
    Handler(
        "CudaEvent.wait",
        "suppress(RuntimeError)",
        "The error of the device is raised where the caller next asks whether the wait is over.",
        NO + "the caller asks at once",
    ),
    Handler(
        "_state",
        "except Exception",
        "An object that cannot be taken apart shares with no other: a random token stands for it.",
        NO + "the log says so",
    ),
    Handler(
        "digest_media",
        "except Exception",
        "A medium whose values cannot be read has no name, and its request is only computed.",
        "lookups_unhashable",
    ),
    Handler(
        "adapts_base_rows",
        "except Exception",
        "A kernel that cannot be asked is taken for wrong, so that less is stored.",
        "unproven",
    ),
    Handler(
        "mixes_heads",
        "except Exception",
        "A layer that cannot be asked is taken for wrong, so that nothing is stored.",
        "unproven",
    ),
    Handler(
        "LoadedAdapters._digest",
        "except Exception",
        "A LoRA adapter that cannot be read shares with no other: its digest is random.",
        NO + "the log says so, once",
    ),
    Handler(
        "attempt",
        "except Exception",
        "Statistics may be lost, but end neither the engine's loop nor the API server.",
        "stats",
    ),
    # MultiConnector
    Handler(
        "ChildConnector.attempt",
        "except Exception",
        "A connector that cannot report, merge, withdraw or shut down ends nothing of the others.",
        "faults",
    ),
    # The daemon
    Handler(
        "ClientSockets.handle_messages",
        "except Exception",
        "The fault of one client's request closes its connection, and no other client notices.",
        "refused",
    ),
    Handler(
        "DaemonServer._open_daemon",
        "except Exception",
        "The daemon starts with an empty arena where the earlier daemon's cannot be taken over.",
        "recoveries_failed",
    ),
    Handler(
        "Waker.clear",
        "suppress(BlockingIOError)",
        "Another call has read the wake-up bytes already.",
        NO + "nothing is lost, because the caller looks at every queue next",
    ),
    Handler(
        "Waker.wake",
        "suppress(OSError)",
        "A full buffer already wakes the loop, and a closed one has no loop to wake.",
        NO + "nothing is lost in either case",
    ),
    Handler(
        "_notify",
        "suppress(OSError)",
        "A service manager that does not hear the daemon keeps it from nothing.",
        NO + "the manager says itself that it heard nothing in time",
    ),
    Handler(
        "_detach.on_serving",
        "suppress(BrokenPipeError)",
        "Whoever started the daemon may be gone, and the daemon goes on.",
        NO + "nobody is left who would want to know",
    ),
    Handler(
        "serve",
        "suppress(OSError)",
        "The kernel may refuse the batch policy, and the daemon then runs with the default one.",
        NO + "it happens once, and costs latency only",
    ),
    Handler(
        "WebPages.__call__",
        "except Exception",
        "A page that fails is answered with status 500, and the daemon goes on.",
        "pages_failed",
    ),
    Handler(
        "_HttpServer.service_actions",
        "suppress(OSError)",
        "The client may have closed the connection that its time limit is about to close.",
        NO + "the wanted state is reached",
    ),
    # The boundary of all tiers
    Handler(
        "execute",
        "except Exception",
        "Whatever a tier raises is the outcome of its job, and a miss for whoever waits.",
        "failures",
    ),
    Handler(
        "_write",
        "suppress(TierError)",
        "A record that may be damaged is written over where it cannot be removed before.",
        NO + "the write that follows fails or heals it",
    ),
    Handler(
        "TierThreads._work",
        "except BaseException",
        "A panic in a tier's library must not end the thread, because the job must be answered.",
        "failures",
    ),
    # The disk tier
    Handler(
        "open_regular",
        "except BaseException",
        "The descriptor is closed whatever went wrong after it was opened.",
        RAISED,
    ),
    Handler(
        "_close",
        "suppress(OSError)",
        "A descriptor of a file system that is gone; the kernel has freed the lock with it.",
        NO + "the wanted state is reached",
    ),
    Handler(
        "DiskTier._put",
        "suppress(OSError)",
        "The write's own error is returned; an error of the cleaning up must not replace it.",
        "failures",
    ),
    Handler(
        "Writers.make_directories",
        "suppress(FileExistsError)",
        "Another daemon wrote the layout's file first; its content is checked next.",
        NO + "it is the usual case of a later start",
    ),
    Handler(
        "FileIndex.remove_file",
        "suppress(FileNotFoundError)",
        "The file that is to be removed is gone already, and is counted no longer.",
        NO + "the wanted state is reached",
    ),
    Handler(
        "FileIndex.touch",
        "suppress(OSError)",
        "The file's time of last use cannot be written; memory still has it.",
        NO + "only the order of eviction after a restart is less exact",
    ),
    Handler(
        "FileIndex.index_directory",
        "suppress(FileNotFoundError)",
        "Another process removed the file between the listing and the look at it.",
        NO + "a file that is gone does not belong to the index",
    ),
    Handler(
        "Writers.index_others",
        "suppress(FileNotFoundError)",
        "The other writer's directory was removed while it was looked at.",
        NO + "the next look forgets its records",
    ),
    Handler(
        "Writers._take_over",
        "suppress(FileNotFoundError)",
        "Another daemon renamed the directory first, and takes it over alone.",
        NO + "exactly one daemon is meant to succeed",
    ),
    Handler(
        "Writers._take_over",
        "suppress(FileNotFoundError)",
        "What the lost writer left in the directory is gone already.",
        NO + "the wanted state is reached",
    ),
    Handler(
        "Writers._take_over",
        "suppress(OSError)",
        "A directory that is not empty stays, and is taken over again later.",
        NO + "the next take-over tries it again",
    ),
    Handler(
        "Writers._adopt_files",
        "suppress(FileNotFoundError)",
        "The record was removed before it could be taken over.",
        NO + "a record that is gone is a miss, which lookups count",
    ),
    Handler(
        "_mean_bytes",
        "suppress(OSError)",
        "The size of one file of a sample is not needed: the log says about how much there is.",
        NO + "the sentence says about",
    ),
    Handler(
        "shards",
        "suppress(FileNotFoundError)",
        "The writer's directory does not exist yet, or no longer, and so has no records.",
        NO + "an empty result is the right one",
    ),
    Handler(
        "shard_records",
        "suppress(FileNotFoundError, NotADirectoryError)",
        "The path is gone, or is no directory of records, and so has none.",
        NO + "an empty result is the right one",
    ),
    Handler(
        "homes",
        "suppress(FileNotFoundError)",
        "The root has no directory of writers yet.",
        NO + "an empty result is the right one",
    ),
    Handler(
        "silent_seconds",
        "suppress(FileNotFoundError)",
        "Without the file that shows life, the directory's own time is used, then None.",
        NO + "the caller decides by the result",
    ),
    Handler(
        "fsck",
        "suppress(FileNotFoundError)",
        "No damaged file was ever put aside, so the directory for them does not exist.",
        NO + "the report's count of such files is then 0",
    ),
    Handler(
        "fsck",
        "suppress(FileNotFoundError)",
        "A running daemon removed the file that was put aside.",
        NO + "a file that is gone does not belong to the report",
    ),
    Handler(
        "_WriterCheck.check_all",
        "suppress(FileNotFoundError)",
        "A running daemon evicted the record before it could be proved.",
        NO + "a record that is gone does not belong to the report",
    ),
    Handler(
        "_WriterCheck._check",
        "suppress(OSError)",
        "A leftover that cannot be removed stays, and the report tells it from the removed ones.",
        "leftovers_removed",
    ),
    # The Mooncake tier
    Handler(
        "MooncakeTier.put",
        "suppress(TierError)",
        "Where a damaged record cannot be removed first, the write of its key is refused.",
        "failures",
    ),
    Handler(
        "answer_calls",
        "except Exception",
        "The child process sends the library's error to the daemon, which raises it as TierError.",
        "failures",
    ),
    Handler(
        "IsolatedProcess.load_library",
        "except BaseException",
        "The process is killed whatever went wrong.",
        RAISED,
    ),
    Handler(
        "IsolatedProcess.describe_exit",
        "suppress(subprocess.TimeoutExpired)",
        "The process has not ended, so the message says no exit status.",
        NO + "the caller raises the error that the message belongs to",
    ),
    Handler(
        "IsolatedProcess.close_or_kill",
        "suppress(TierError)",
        "A client that does not leave the store in order in time is killed.",
        NO + "the daemon is stopping, and the store's own timeout does the rest",
    ),
    Handler(
        "IsolatedProcess.kill_child",
        "suppress(OSError)",
        "The child may have closed its end of the lane already.",
        NO + "the wanted state is reached",
    ),
    # The Valkey tier
    Handler(
        "RespConnection.abort",
        "suppress(OSError)",
        "The server may have ended the connection already.",
        NO + "the wanted state is reached",
    ),
    Handler(
        "ConnectionPool.connection",
        "except BaseException",
        "A connection in the middle of a reply cannot be used again.",
        RAISED,
    ),
    Handler(
        "ConnectionPool._connect",
        "except BaseException",
        "A connection that is not logged in is closed.",
        RAISED,
    ),
    Handler(
        "ConnectionPool._dial",
        "except BaseException",
        "A socket that is not connected is closed.",
        RAISED,
    ),
    # Shared memory, wire and client
    Handler(
        "Arena.close",
        "suppress(BufferError)",
        "A view of the arena is still in use; the mapping ends with the last view.",
        NO + "the memory is released later, and at the latest with the process",
    ),
    Handler(
        "create_arena",
        "except BaseException",
        "The file and its descriptor are gone whatever went wrong.",
        RAISED,
    ),
    Handler(
        "take_over_arena",
        "except BaseException",
        "The file descriptor is closed whatever went wrong.",
        RAISED,
    ),
    Handler(
        "runtime_directory",
        "suppress(OSError)",
        "The directory that the environment names is gone.",
        NO + "the socket is in the user's directory below /tmp, as without the variable",
    ),
    Handler(
        "_open_removed",
        "suppress(OSError)",
        "The process is gone, is another user's, or closed the file meanwhile.",
        "attach_failed",
    ),
    Handler(
        "_number",
        "suppress(OSError, ValueError)",
        "The control group has no such limit.",
        NO + "the limits that are there are the limit, or else the machine's own memory is",
    ),
    Handler(
        "_lines",
        "suppress(OSError)",
        "This machine has no such control group, or the process has ended.",
        NO + "the limits that are there are the limit, or else the machine's own memory is",
    ),
    Handler(
        "append",
        "except BaseException",
        "The buffer is cut back to the messages that were encoded as a whole.",
        RAISED,
    ),
    Handler(
        "decode_request",
        "suppress(*_UNREADABLE)",
        "The bytes are no greeting of another version either.",
        "refused",
    ),
    Handler(
        "ControlClient.__enter__",
        "except BaseException",
        "The connection is closed whatever went wrong.",
        RAISED,
    ),
    Handler(
        "Link.close",
        "suppress(OSError)",
        "The last message is sent only if the daemon is there and the buffer has room.",
        NO + "the daemon ends the session with the connection in any case",
    ),
    Handler(
        "Link._lose",
        "suppress(OSError)",
        "The connection is lost already, and closing it may say so once more.",
        NO + "the caller reports the loss itself",
    ),
    # Commands
    Handler(
        "EngineProcess.__enter__",
        "except BaseException",
        "The engine's process is ended whatever went wrong.",
        RAISED,
    ),
    Handler(
        "main",
        "suppress(EOFError, ConnectionError)",
        "The parent says with the end of its connection that the engine is not needed any more.",
        NO + "the parent waits for the process and sees how it ends",
    ),
    Handler(
        "_written_whole",
        "suppress(OSError)",
        "A path that cannot be looked at is usually a new file.",
        NO + "any other error is raised when the file is opened",
    ),
    Handler(
        "_check_version",
        "suppress(tarfile.HeaderError)",
        "Most blocks at the end of a file are no headers of members.",
        NO + "a file without a last member is found to be cut when it is read",
    ),
    Handler(
        "_refusal",
        "suppress(ConfigError, OSError)",
        "A socket that a remedy might name may be refused too.",
        NO + "the next one is tried, and the error is raised in any case",
    ),
    Handler(
        "_from_disk",
        "suppress(FileNotFoundError)",
        "A running daemon evicted the record while the export listed it.",
        NO + "a record that is gone does not belong to the export",
    ),
    Handler(
        "run_import",
        "suppress(OSError)",
        "Where the import cannot be marked as ended, daemons take it over after a longer silence.",
        NO + "the records are imported all the same",
    ),
    Handler(
        "_write_no_more",
        "suppress(AttributeError, OSError)",
        "A stream without a descriptor, or on a full disk, cannot be flushed as the command ends.",
        NO + "the command ends, and its exit status is set already",
    ),
    Handler(
        "inspect",
        "suppress(ConfigError)",
        "The preview has no settings to show where they are wrong.",
        NO + "the findings of the configuration already name the error",
    ),
    Handler(
        "inspect.remedy",
        "except Exception",
        "vLLM refuses the arguments without this connector too, which is said as the remedy.",
        NO + "a finding has it",
    ),
    Handler(
        "_why_not_imported",
        "except Exception",
        "An import of vLLM may raise anything; `doctor` says what.",
        NO + "a finding has it",
    ),
    Handler(
        "command_finding", "except Exception", "So may the `vllm` command.", NO + "a finding has it"
    ),
    Handler(
        "command_finding",
        "suppress(SystemExit)",
        "The command ends like this once it has printed its version.",
        NO + "it is the good end",
    ),
    Handler(
        "_log_of",
        "suppress(OSError, ValueError)",
        "A descriptor of the daemon that is closed meanwhile, or another user's, is not its log.",
        NO + "`stats` names no log",
    ),
    Handler(
        "_guarded",
        "except Exception",
        "What vLLM refuses is printed as a finding that failed.",
        NO + "the command prints it and ends with a status that says so",
    ),
    Handler(
        "run_top",
        "suppress(KeyboardInterrupt)",
        "Ctrl-C is how a user leaves the display.",
        NO + "it is the usual end",
    ),
    # The package's parts for tests
    Handler(
        "DaemonProcess.start",
        "suppress(subprocess.TimeoutExpired)",
        "The daemon is still starting, and is asked again.",
        NO + "a daemon that never answers raises HybridKVError",
    ),
)
