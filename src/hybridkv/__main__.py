"""`python -m hybridkv`, and the command `hybridkv`."""

import importlib
import signal
import sys


def main() -> int:
    """Run one command. Returns its exit status.

    Ctrl-C ends it without a traceback, also while its modules are imported.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = importlib.import_module("hybridkv.cli.main")
    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status: int = command.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
