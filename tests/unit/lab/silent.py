"""A child that never answers: `python -m tests.unit.lab.silent FD`."""

import os
import sys

os.read(int(sys.argv[1]), 1)
