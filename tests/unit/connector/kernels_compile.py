"""`python -m tests.unit.connector.kernels_compile` compiles the kernels for an H100, without one.

The interpreter takes more of Python than the compiler does.
"""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybridkv.connector.copy import triton_kernels as kernels
from hybridkv.connector.copy.tables import ENTRY, ROW
from hybridkv.shm.slots import PIECE_BYTES

TARGET = GPUTarget("cuda", 90, 32)
ADDRESS = "i64"


def main() -> None:
    """Compile gather and scatter for the widest words and the narrowest, and the digests."""
    constants = {"ENTRY": ENTRY, "ROW": ROW, "TILE": kernels.TILE_WORDS}
    cases = [
        (
            kernels.copy_blocks_kernel,
            ("entries", "table"),
            {**constants, "WORD": word, "GATHER": gather},
        )
        for word in (tl.int64, tl.int8)
        for gather in (True, False)
    ]
    steps = {"ENTRY": ENTRY, "BLOCKS": PIECE_BYTES // 1024, "STEP": kernels.STEP_BLOCKS}
    for function, addresses, constexprs in [
        *cases,
        (kernels.digest_kernel, ("entries", "keys", "out"), steps),
    ]:
        signature = dict.fromkeys(addresses, ADDRESS) | dict.fromkeys(constexprs, "constexpr")
        source = ASTSource(fn=function, signature=signature, constexprs=constexprs)
        compiled = triton.compile(source, target=TARGET)
        print(compiled.metadata.name, len(compiled.asm["cubin"]), "bytes")


if __name__ == "__main__":
    main()
