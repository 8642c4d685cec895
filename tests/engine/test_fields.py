"""Whatever changes KV is seen by the identity (requirements D16): each field and variable of vLLM.

The tables of tests/engine/fields and of `hybridkv.vllm.unrelated` are held against vLLM's classes,
against the identity of real configurations, and against the bytes in the caches of real engines.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import vllm
from vllm import envs
from vllm.config import LoRAConfig, MultiModalConfig, SpeculativeConfig, VllmConfig
from vllm.config.attention import HiSparseConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.config.engram import EngramConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import fingerprint
from hybridkv.core.settings import Settings
from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT
from hybridkv.lab.models import bundled_environment, bundled_models
from hybridkv.vllm.identity import identity_facts
from hybridkv.vllm.layout import WorkerLayout
from hybridkv.vllm.unrelated import DEFAULTS, FIELDS, LAYOUT, LIBRARY_VARIABLES, VARIABLES, names
from tests.engine.adapters import write_adapter
from tests.engine.fields.changes import ARGUMENTS, UNTRIED, UNTRIED_VARIABLES, VALUES
from tests.engine.fields.table import FACT_VARIABLES, FACTS, INSIDE, OTHER_VARIABLES
from tests.engine.support import arguments_of, since_vllm

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

tables_are_exact = since_vllm(
    32, "the tables are those of 0.32; a field that they lack is a part of the identity"
)
Found = dict[str, dict[str, Any]]
"""The answers of `tests.engine.fields.probe`, by the engine's name."""
_READ = re.compile(
    r"""(?:getenv|environ\.get|environ\.setdefault)\(\s*["'](\w+)["']"""
    r"""|os\.environ\[\s*["'](\w+)["']\s*\](?!\s*=[^=])|["'](\w+)["'] (?:not )?in os\.environ"""
)
"""Matches where a Python file reads an environment variable."""


@functools.cache
def classes() -> dict[str, type]:
    """Returns every data class that a VllmConfig may hold at any depth, by name."""
    found: dict[str, type] = {}

    def inside(hint: Any) -> Iterator[type]:
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield hint
        for argument in typing.get_args(hint):
            yield from inside(argument)

    def walk(owner: type) -> None:
        assert found.setdefault(owner.__name__, owner) is owner, f"two classes {owner.__name__}"
        hints = typing.get_type_hints(owner)
        for each in dataclasses.fields(owner):
            for held in inside(hints[each.name]):
                if held.__name__ not in found:
                    walk(held)

    walk(VllmConfig)
    return found


def listed(*tables: Mapping[str, Mapping[str, str]]) -> Counter[str]:
    """Returns how often each "Class.field" stands in the tables."""
    return Counter(
        f"{owner}.{name}"
        for table in tables
        for owner, reasons in table.items()
        for words in reasons.values()
        for name in words.split()
    )


UNRELATED = listed(FIELDS, INSIDE)
SEEN_ELSEWHERE = {
    f"{owner}.{name}"
    for table in (FIELDS, INSIDE)
    for owner, reasons in table.items()
    for reason in (LAYOUT, DEFAULTS)
    for name in reasons.get(reason, "").split()
} | {"CacheConfig.prefix_caching_hash_algo"}
"""Unrelated fields whose changes other facts show."""
UNSEEN = {name: value for name, value in ARGUMENTS.items() if name not in SEEN_ELSEWHERE}
CHOICES = [
    "1",
    "full",
    "cuda",
    "int8",
    "highest",
    "INT8",
    "auto",
    "a8w4",
    "DS",
    "uniform_random",
    "{}",
]
"""Values to try where a switch's is none."""


@tables_are_exact
def test_every_field_of_this_vllm_stands_in_one_table() -> None:
    """A new one is a part of the identity until somebody has said why it need not be."""
    facts = {owner: {"": words} for owner, words in FACTS.items()}
    there = {
        f"{owner}.{field.name}"
        for owner, held in classes().items()
        for field in dataclasses.fields(held)
    }
    assert dict(listed(FIELDS, INSIDE, facts)) == dict.fromkeys(there, 1)


@tables_are_exact
def test_every_variable_of_this_vllm_stands_in_one_table() -> None:
    tables = [VARIABLES, {"": FACT_VARIABLES}]
    named = Counter(name for table in tables for words in table.values() for name in words.split())
    assert dict(named) == dict.fromkeys(envs.environment_variables, 1)
    read = set()
    for path in Path(vllm.__file__).parent.rglob("*.py"):
        if path.name != "envs.py":
            text = path.read_text(errors="replace")
            read |= {next(filter(None, found.groups())) for found in _READ.finditer(text)}
    elsewhere = read - envs.environment_variables.keys()
    assert elsewhere - {*LIBRARY_VARIABLES.split()} == names(OTHER_VARIABLES)


@tables_are_exact
def test_every_unrelated_field_and_variable_is_tried_or_said_why_not() -> None:
    untried = Counter(name for words in UNTRIED.values() for name in words.split())
    assert dict(Counter([*ARGUMENTS]) + untried) == dict(UNRELATED)
    assert {*values("")}.isdisjoint(names(UNTRIED_VARIABLES))
    assert {*values("")} | names(UNTRIED_VARIABLES) == names(VARIABLES)


def engine_config(*arguments: str) -> Any:
    """Returns the configuration that vLLM makes of an engine's arguments."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(arguments_of("qwen3", None, *arguments))
    return EngineArgs.from_cli_args(parsed).create_engine_config()


@pytest.fixture(scope="module")
def config() -> Any:
    """A real configuration of the bundled qwen3. Tests change copies of it."""
    return engine_config()


def identity(vllm_config: Any) -> bytes:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")
    kv_config = KVCacheConfig(1, [], [KVCacheGroupSpec(["layer"], spec)])
    geometry = Geometry((Group(0, GroupKind.FULL, 16, (1,)),), 16, 16, 16)
    layouts = {0: WorkerLayout({0: ()}, "cpu", "weights")}
    facts = identity_facts(vllm_config, kv_config, geometry, layouts, Settings())
    return fingerprint(json.loads(json.dumps(facts)))


def altered(value: Any) -> Any:
    """Returns another value: none for a configuration, a text for what is no plain value."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "some"]
    if isinstance(value, dict):
        return {**value, "some": 1}
    return None if dataclasses.is_dataclass(value) else "some"


def instances(held: Any) -> Iterator[Any]:
    """Yields a configuration and all that it holds at any depth."""
    yield held
    for field in dataclasses.fields(held):
        inside = getattr(held, field.name, None)
        if type(inside) in classes().values():
            yield from instances(inside)


def with_optional_parts(config: Any) -> Any:
    """A copy that has the parts which most engines lack."""
    full = copy.deepcopy(config)
    model = full.model_config
    model.multimodal_config = MultiModalConfig()
    model.quantization_config = QuantizationConfigArgs(
        linear="fp8_per_tensor", moe="int4_per_group_32"
    )
    full.attention_config.hisparse_config = HiSparseConfig()
    full.engram_config, full.lora_config = EngramConfig(), LoRAConfig()
    full.quant_config = Fp8Config()  # No data class: its text has an address in it.
    full.diffusion_config = DiffusionConfig(canvas_length=8)
    full.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=2,
        prompt_lookup_max=2,
        target_model_config=model,
        target_parallel_config=full.parallel_config,
    )
    return full


@tables_are_exact
def test_every_fact_changes_the_identity_and_nothing_else_does(config: Any) -> None:
    """One change at a time on real configurations. The values need not be possible ones."""
    facts = {f"{owner}.{name}" for owner, words in FACTS.items() for name in words.split()}
    seen = {"ModelConfig.hf_config", "ModelConfig.hf_text_config"}  # See the next tests.
    for whole in (config, with_optional_parts(config)):
        before = identity(whole)
        assert identity(copy.deepcopy(whole)) == before
        for held in [*instances(whole)]:
            for each in dataclasses.fields(held):
                name = f"{type(held).__name__}.{each.name}"
                value = getattr(held, each.name, None)
                if name in seen:
                    continue
                seen.add(name)
                if type(value) in classes().values():
                    continue  # Its own fields are changed.
                object.__setattr__(held, each.name, altered(value))
                is_other = identity(whole) != before
                object.__setattr__(held, each.name, value)
                hashed = name == "CacheConfig.prefix_caching_hash_algo"  # By the fact `hash`.
                assert is_other == (name in facts or hashed), name
    assert facts - seen == set(), "no configuration here has these"


class Slotted:
    """It keeps its state in a slot."""

    __slots__ = ("bits",)

    def __init__(self, bits: int) -> None:
        self.bits = bits


@pytest.mark.parametrize(
    "make",
    [Slotted, lambda n: bytes([n]), functools.partial(functools.partial, int), numpy.array],
    ids=["slots", "bytes", "partial", "array"],
)
def test_what_an_object_keeps_outside_its_dictionary_is_a_fact(
    config: Any, make: Callable[[int], object]
) -> None:
    """Requirements D16: two quantizations of one class, and what differs is not in `__dict__`."""
    names = []
    for bits in (4, 8, 4):
        changed = copy.copy(config)
        object.__setattr__(changed, "quant_config", make(bits))
        names.append(identity(changed))
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("make", [threading.Lock, lambda: torch.zeros(4)], ids=["lock", "tensor"])
def test_a_setting_that_cannot_be_read_is_shared_with_nobody(
    config: Any, make: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Also not with another engine of this process, whose setting is another object."""
    changed = copy.copy(config)
    object.__setattr__(changed, "quant_config", make())
    with caplog.at_level("WARNING"):
        assert identity(changed) != identity(changed)
    assert "cannot be read" in caplog.text


@tables_are_exact
def test_a_drafters_configuration_is_a_fact(config: Any) -> None:
    """Its weights are digested with the target's, and its other fields are tried above."""
    full = with_optional_parts(config)
    speculative = full.speculative_config
    speculative.draft_model_config = copy.deepcopy(speculative.draft_model_config)
    before = identity(full)
    speculative.draft_model_config.hf_config.rms_norm_eps *= 2
    assert identity(full) != before
    full.speculative_config = None
    assert identity(full) != before


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1000000.0}},
        {"num_hidden_layers": 3},
        {"sliding_window": 64, "use_sliding_window": True},
        {"rms_norm_eps": 1e-5},
        {"attention_bias": True},
        {"head_dim": 32},
    ],
    ids=" ".join,
)
def test_what_hf_overrides_change_is_a_fact(config: Any, overrides: dict[str, Any]) -> None:
    changed = engine_config(f"--hf-overrides={json.dumps(overrides)}")
    assert identity(changed) != identity(config)
    assert identity(engine_config('--hf-overrides={"vocab_size": 2048}')) == identity(config)


def test_the_served_length_is_a_fact_where_rope_stands_inside_a_text_config(config: Any) -> None:
    """llama4 scales its attention from 32k on, and phi3 takes other frequencies."""
    lengths = []
    for length in (4096, 65536):
        changed = copy.deepcopy(config)
        changed.model_config.hf_config.rope_parameters = None
        changed.model_config.max_model_len = length
        lengths.append(identity(changed))
    assert len({*lengths}) == 2


@tables_are_exact
def test_every_variable_that_is_a_fact_changes_the_identity_and_no_other(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = [*FACT_VARIABLES.split(), *LIBRARY_VARIABLES.split()]
    for name in facts:
        monkeypatch.delenv(name, raising=False)
    before = identity(config)
    for name in names(VARIABLES) | names(OTHER_VARIABLES) - {"PYTHONHASHSEED"}:
        monkeypatch.setenv(name, "1")
    assert identity(config) == before
    for name in facts:
        changed = before
        for value in CHOICES:
            monkeypatch.setenv(name, value)
            with contextlib.suppress(ValueError):
                changed = identity(config)
                break
        monkeypatch.delenv(name)
        assert changed != before, name


def test_code_and_processors_beside_the_weights_are_facts(config: Any, tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text("x = 1")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    plain, trusted, seeing = (copy.deepcopy(config) for _ in range(3))
    for variant in (plain, trusted, seeing):
        variant.model_config.model = str(tmp_path)
    trusted.model_config.trust_remote_code = True
    seeing.model_config.multimodal_config = MultiModalConfig()
    before = [identity(variant) for variant in (plain, trusted, seeing)]
    (tmp_path / "modeling.py").write_text("x = 2")
    after = [identity(variant) for variant in (plain, trusted, seeing)]
    assert [*map(bytes.__eq__, before, after)] == [True, False, True]
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": 0.5}')
    last = [identity(variant) for variant in (plain, trusted, seeing)]
    assert [*map(bytes.__eq__, after, last)] == [True, True, False]
    moved = shutil.copytree(tmp_path, tmp_path / "elsewhere")
    trusted.model_config.model = str(moved)
    assert identity(trusted) == last[1], "where the files are does not matter"
    trusted.model_config.model, ours = "org/not-here", identity(trusted)
    assert identity(trusted) != ours
    assert identity(trusted) != identity(trusted), "a name does not say what the code is"
    seeing.model_config.model = "org/not-here"
    assert identity(seeing) == identity(seeing), "processors' values are in the names of chunks"


def values(directory: str) -> dict[str, str]:
    """Returns another value for each unrelated variable that is tried."""
    found = {name: value.format(directory=directory) for name, value in VALUES.items()}
    for name in names(VARIABLES) - names(UNTRIED_VARIABLES) - found.keys():
        value = envs.environment_variables[name]()
        assert isinstance(value, int | float), f"{name} has no value to try"
        found[name] = str(int(not value) if isinstance(value, bool) else value + 1)
    return found


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """The paths that stand for `{directory}` and `{model}` in a change."""
    directory = shutil.copytree(bundled_models()["qwen3"], tmp_path / "model")
    (tmp_path / "empty").mkdir()
    return {"{directory}": str(tmp_path / "empty"), "{model}": str(directory)}


def placed(argument: str, places: Mapping[str, str]) -> str:
    for place, path in places.items():
        argument = argument.replace(place, path)
    return argument


@tables_are_exact
def test_each_unrelated_argument_leaves_the_configurations_identity(
    config: Any, places: dict[str, str]
) -> None:
    for argument in UNSEEN.values():
        changed = engine_config(placed(argument, places))
        assert identity(changed) == identity(config), argument


class ProbeCase(NamedTuple):
    """An engine of tests.engine.fields.probe."""

    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    adapter: str = ""
    """The directory of a LoRA adapter."""


PLAIN = ProbeCase()
COLOURLESS = ProbeCase(environment={"NO_COLOR": "1"})
"""A case with a variable, so that its engine starts as the others of its test do."""


@pytest.fixture
def probe(tmp_path: Path, places: dict[str, str]) -> Any:
    """Runs the engines of cases one after the other. Returns the answers by the case's name."""

    def run(cases: Mapping[str, ProbeCase]) -> Found:
        lines, nobody = [], str(tmp_path / "nobody")
        for name, case in cases.items():
            arguments = [placed(argument, places) for argument in case.arguments]
            every = arguments_of("qwen3", nobody, *arguments)
            line = {"name": name, "environment": case.environment, "adapter": case.adapter}
            lines.append(json.dumps({**line, "arguments": every}))
        environment = {**ENGINE_ENVIRONMENT, **os.environ, **bundled_environment("qwen3")}
        child = subprocess.run(
            [sys.executable, "-m", "tests.engine.fields.probe"],
            input="\n".join(lines),
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
            env=environment | {"VLLM_LOGGING_LEVEL": "ERROR"},
        )
        answers = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
        found = {answer["name"]: answer for answer in answers}
        assert found.keys() == cases.keys(), child.stderr[-3000:]
        refused = {name: answer["refused"] for name, answer in found.items() if "refused" in answer}
        assert not refused
        return found

    return run


def judge(found: Found) -> None:
    """The bytes are those of "base", or the identity says that they are not."""
    base = found["base"]
    lies = [
        name
        for name, answer in found.items()
        if answer["identity"] == base["identity"] and answer["kv"] != base["kv"]
    ]
    assert not lies, "other bytes under one identity"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_all_that_is_unrelated_at_once_changes_neither_bytes_nor_identity(
    probe: Any, tmp_path: Path
) -> None:
    together = ProbeCase([*UNSEEN.values()], values(str(tmp_path / "empty")))
    found = probe({"base": COLOURLESS, "all": together})
    judge(found)
    assert found["all"]["identity"] == found["base"]["identity"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_each_unrelated_argument_changes_neither_bytes_nor_identity(probe: Any) -> None:
    found = probe(
        {"base": PLAIN} | {name: ProbeCase([argument]) for name, argument in ARGUMENTS.items()}
    )
    judge(found)
    for name in UNSEEN:
        assert found[name]["identity"] == found["base"]["identity"], f"{name} costs hits"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_drawn_changes_of_variables_and_arguments(
    probe: Any, tmp_path: Path, rng: random.Random
) -> None:
    """Each engine has some of the unrelated variables set, and one argument."""
    found = values(str(tmp_path / "empty"))
    cases = {"base": COLOURLESS}
    for number in range(6):
        variables = rng.sample(sorted(found), rng.randint(1, 20))
        name = rng.choice(sorted(ARGUMENTS))
        environment = {variable: found[variable] for variable in variables}
        cases[f"{number} {name} {variables}"] = ProbeCase([ARGUMENTS[name]], environment)
    judge(probe(cases))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_engines_that_lied_before_are_told_apart(probe: Any, tmp_path: Path) -> None:
    """Their bytes do differ, and their identities were one.

    oneDNN computes in bfloat16 where the processor has tiles, and else the variable says nothing.
    """
    adapter = write_adapter(tmp_path / "adapter", 3)
    lora = ["--enable-lora", "--max-lora-rank=8"]
    found = probe(
        {
            "base": PLAIN,
            "oneDNN": ProbeCase(environment={"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}),
            "lora": ProbeCase(lora, adapter=adapter),
            "lora dtype": ProbeCase([*lora, "--lora-dtype=bfloat16"], adapter=adapter),
        }
    )
    has_tiles = torch.cpu._is_amx_tile_supported() and not os.environ.get("HYBRIDKV_TEST_CPU")
    for plain, changed, differs in (("base", "oneDNN", has_tiles), ("lora", "lora dtype", True)):
        assert not differs or found[plain]["kv"] != found[changed]["kv"], "the change is one"
        assert found[plain]["identity"] != found[changed]["identity"]
