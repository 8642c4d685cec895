"""`scripts/gpu pack` and `scripts/gpu unpack`: vLLM for a machine that cannot download it.

The pieces are below 60 MiB each, because a machine that is lent may take no more at once. PyTorch,
Triton and transformers are the machine's own: vLLM's libraries use PyTorch's stable ABI, and of
those that are carried none needs a newer PyTorch than 2.11.
"""

import io
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIECES = ROOT / ".gpu"
SITE = Path("/tmp/hybridkv-gpu-site")
PYTHON = "3.12"
GLIBC_MINORS = range(17, 40)  # The machine has glibc 2.39.
PIECE_BYTES = 58 << 20
LARGE_BYTES = 8 << 20  # Larger files are packed by themselves, so that they can be spread.
XZ_PRESET = 1
CODE = "code.tar"  # All small files of all wheels.
LEFT_OUT = (
    *("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/_qutlass_C"),
    *("vllm/vllm-rs", "vllm/_flashkda_C", "vllm/vllm_flash_attn/_vllm_fa2_C"),
)
"""Of no use on Hopper, where FlashAttention 3 serves, or in need of PyTorch 2.13."""


def pack() -> None:
    """Download the wheels of requirements/gpu.txt and write .gpu/p0.tar, p1.tar and so on.

    The piece that has Python's files is the last one: stages A and B need no other.
    """
    wheels = PIECES / "wheels"
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC_MINORS)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    options = [f"--python-version={PYTHON}", "--implementation=cp", *platforms, f"--dest={wheels}"]
    requirements = ["--requirement", str(ROOT / "requirements" / "gpu.txt")]
    print("downloading wheels (340 MB) ...", file=sys.stderr)
    subprocess.run([*pip, *options, *requirements], check=True)
    print("packing (about two minutes) ...", file=sys.stderr)
    pieces: list[list[tuple[str, bytes]]] = []
    for name, content in sorted(
        _packed(sorted(wheels.glob("*.whl"))), key=lambda one: -len(one[1])
    ):
        roomy = (
            one for one in pieces if sum(len(each) for _, each in one) < PIECE_BYTES - len(content)
        )
        piece = next(roomy, None)
        if piece is None:
            pieces.append(piece := [])
        piece.append((name, content))
    pieces.sort(key=lambda piece: any(name == CODE for name, _ in piece))
    for number, piece in enumerate(pieces):
        path = PIECES / f"p{number}.tar"
        with tarfile.open(path, "w") as archive:
            for name, content in piece:
                _add(archive, name, content)
        print(f"{path.relative_to(ROOT)} {path.stat().st_size} bytes")


def unpack(pieces: Iterable[Path]) -> None:
    """Put the pieces' files below SITE, where the stages find them."""
    for piece in pieces:
        with tarfile.open(piece) as archive:
            for member in archive:
                content = archive.extractfile(member)
                assert content is not None
                plain = lzma.decompress(content.read())
                if member.name == CODE:
                    with tarfile.open(fileobj=io.BytesIO(plain)) as code:
                        code.extractall(SITE, filter="tar")
                else:
                    path = SITE / member.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(plain)
        print(f"unpacked {piece.name} to {SITE}")


def _packed(wheels: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """(name, compressed content) of each large file, and of all others as one archive."""
    code = io.BytesIO()
    with tarfile.open(fileobj=code, mode="w") as archive:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as files:
                for info in files.infolist():
                    if info.is_dir() or info.filename.startswith(LEFT_OUT):
                        continue
                    content = files.read(info)
                    if len(content) > LARGE_BYTES:
                        yield info.filename, lzma.compress(content, preset=XZ_PRESET)
                    else:
                        _add(archive, info.filename, content)
    yield CODE, lzma.compress(code.getvalue(), preset=XZ_PRESET)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o755
    archive.addfile(info, io.BytesIO(content))
