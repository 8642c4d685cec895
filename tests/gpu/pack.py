"""`scripts/gpu pack` and `scripts/gpu unpack`: vLLM for a machine that cannot download it.

All is one archive below 60 MiB, because a machine that is lent may take no more at once. PyTorch,
Triton and transformers are the machine's own: vLLM's libraries use PyTorch's stable ABI, and of
those that are carried none needs a newer PyTorch than 2.11.
"""

import compileall
import io
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / ".gpu"
ARCHIVE = DIRECTORY / "vllm.tar.xz"
SITE = Path("/tmp/hybridkv-gpu-site")
PYTHON = os.environ.get("GPU_PYTHON", "3.12")
GLIBC_MINORS = range(17, 40)  # The machine has glibc 2.39.
ARCHIVE_BYTES_MAX = 57 << 20
LEFT_OUT = (
    *("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/_qutlass_C"),
    *("vllm/vllm-rs", "vllm/_flashkda_C", "vllm/vllm_flash_attn/_vllm_fa2_C"),
    *("tvm_ffi/3rdparty/", "tvm_ffi/include/", "vllm/benchmarks/"),
)
"""Of no use on Hopper, where FlashAttention 3 serves, or in need of PyTorch 2.13."""

HOPPER = 90  # Compute capability 9.0.
_PTX, _CUBIN = 1, 2
_FATBIN = struct.Struct("<IHHQ")  # Magic, version, bytes of this header, bytes of the entries.
_FATBIN_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQIIHHI")


def pack() -> None:
    """Download the wheels of requirements/gpu.txt and write their files into one archive."""
    wheels = DIRECTORY / f"wheels-{PYTHON}"
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC_MINORS)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    options = [f"--python-version={PYTHON}", "--implementation=cp", *platforms, f"--dest={wheels}"]
    requirements = ["--requirement", str(ROOT / "requirements" / "gpu.txt")]
    print("downloading wheels (340 MB) ...", file=sys.stderr)
    subprocess.run([*pip, *options, *requirements], check=True)
    print("packing (about two minutes) ...", file=sys.stderr)
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as files:
                for info in files.infolist():
                    if not info.is_dir() and not info.filename.startswith(LEFT_OUT):
                        content = files.read(info)
                        if info.filename.endswith(".so"):
                            content = for_hopper(content)
                        member = tarfile.TarInfo(info.filename)
                        member.size, member.mode = len(content), 0o755
                        archive.addfile(member, io.BytesIO(content))
    size = ARCHIVE.stat().st_size
    print(f"{ARCHIVE.relative_to(ROOT)} {size} bytes")
    if size > ARCHIVE_BYTES_MAX:
        raise SystemExit(f"error: {ARCHIVE.name} is above {ARCHIVE_BYTES_MAX} bytes")


def unpack() -> None:
    """Put the archive's files below SITE, where the stages find them."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(SITE, filter="tar")
    compileall.compile_dir(SITE, quiet=2, workers=0)  # Else each engine does so when it starts.
    print(f"unpacked {ARCHIVE.name} to {SITE}")


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """One entry of a fat binary: code for one architecture, at [start, end) of the library."""

    kind: int  # _PTX or _CUBIN.
    architecture: int
    start: int
    end: int


def for_hopper(library: bytes) -> bytes:
    """Return the same library, with zeros for the device code that a Hopper GPU does not load.

    CUDA takes code of the GPU's own architecture from a fat binary, and the newest PTX that is not
    newer where there is none. Headers and offsets stay as they are, so nothing moves; the zeros
    take no room in an archive.
    """
    content = bytearray(library)
    magic, at = _FATBIN_MAGIC.to_bytes(4, "little"), 0
    while (at := content.find(magic, at)) >= 0:
        _, version, header_bytes, size = _FATBIN.unpack_from(content, at)
        if version != 1 or header_bytes != _FATBIN.size:
            at += len(magic)
            continue
        start, at = at + header_bytes, at + header_bytes + size
        entries = _entries(content, start, at)
        own = [entry for entry in entries if entry.kind == _CUBIN and entry.architecture == HOPPER]
        older = [entry for entry in entries if entry.kind == _PTX and entry.architecture <= HOPPER]
        newest = max((entry.architecture for entry in older), default=0)
        kept = own or [entry for entry in older if entry.architecture == newest]
        for entry in entries:
            if entry not in kept:
                content[entry.start : entry.end] = bytes(entry.end - entry.start)
    return bytes(content)


def _entries(content: bytearray, start: int, end: int) -> list[DeviceCode]:
    entries: list[DeviceCode] = []
    while start < end:
        kind, _, header_bytes, size, *_, architecture = _ENTRY.unpack_from(content, start)
        start += header_bytes
        entries.append(DeviceCode(kind, architecture, start, start + size))
        start += size
    return entries
