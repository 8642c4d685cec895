"""A small model with random weights, a tokenizer and a chat template, to try `vllm serve` with."""

from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from hybridkv.lab.models import bundled_models
from hybridkv.lab.prompts import english

TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}assistant:"
WEIGHTS = {"initializer_range": 0.12, "tie_word_embeddings": False}
"""Random weights with which an answer depends on the whole prompt."""
_TEXT_TOKENS = 1 << 16  # Of the text that the tokenizer is made from.


def write_tiny_model(directory: Path) -> None:
    """Write the bundled Gemma 3 to a directory: sliding and full attention, a context of 8,192.

    The same weights come of each call. Its answers make no sense, and a wrong byte of its KV
    changes them.
    """
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Gemma3TextConfig.from_pretrained(bundled_models()["gemma3"], **WEIGHTS)
    Gemma3ForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Write a tokenizer of at most so many tokens, and a chat template, to a directory."""
    trained = ByteLevelBPETokenizer()
    text = english(_TEXT_TOKENS).splitlines()
    trained.train_from_iterator(text, vocabulary, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
