"""`hybridkv model` writes something that can be served, and says how."""

import json
from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.lab.configuration import serve_command

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_a_model_with_a_tokenizer_and_the_command_that_serves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    directory = tmp_path / "a model"
    assert main(["model", str(directory), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    serving = serve_command(document["command"])
    assert serving.arguments[0] == document["directory"] == str(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "The Unix socket of a daemon."
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < AutoConfig.from_pretrained(directory).vocab_size
    assert tokenizer.chat_template
    weights = (directory / "model.safetensors").stat()
    assert main(["model", str(directory)]) == 2
    assert capsys.readouterr().err.endswith(" is not empty; a new directory works\n")
    assert (directory / "model.safetensors").stat() == weights
