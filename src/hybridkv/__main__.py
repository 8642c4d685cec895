"""`python -m hybridkv`."""

import sys

from hybridkv.cli.main import main

sys.exit(main())
