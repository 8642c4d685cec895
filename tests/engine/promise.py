"""`python -m tests.engine.promise ARGUMENT...`: what `hybridkv plan` reads of vLLM's arguments."""

import sys

import msgspec

from hybridkv.lab.configuration_child import inspect


def main() -> None:
    """Print a ConfigReport as a line of JSON."""
    print(msgspec.json.encode(inspect(sys.argv[1:])).decode())


if __name__ == "__main__":
    main()
