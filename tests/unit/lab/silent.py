"""A child that never answers: `python -m tests.unit.lab.silent FD [deaf]`.

It ends with the connection, unless it is deaf, as an engine is while it computes.
"""

import os
import signal
import sys

if sys.argv[2:] == ["deaf"]:
    signal.pause()
os.read(int(sys.argv[1]), 1)
