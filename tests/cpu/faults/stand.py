"""The test stand: twins and recorded traces made once, a fault planted in a copy, the command run, and what it said."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from dayzero.acceptance.align import AlignOptions, align_source
from dayzero.acceptance.oracle import SCRIPTS
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.open import open_model
from dayzero.errors import UserError
from dayzero.finding import Finding
from dayzero.models.recipe import Recipe
from dayzero.ops.catalog import CATALOG, REFERENCE, Catalog, Line
from dayzero.planner.inspect import inspect_source
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.planner import plan_source
from dayzero.rehearse.twin import TwinOptions, write_twin
from tests.cpu.faults.catalogue import Fault

CONFIGS = Path(__file__).parents[2] / "paper" / "configs"
# Above every window and top-k of the twins (8), and no multiple of the seven tokens that align cuts chunks of. The long
# one is for faults of precision in a sparse index, which show only where two of many rows score nearly alike.
NUM_TOKENS = 32
MORE_TOKENS = {"index_long": 96}
FAULTY = ("tests.cpu.faults.operators", "tests.cpu.faults.depth_operators")

NVFP4 = {
    "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "input_activations": None,
                "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            }
        },
    }
}  # fmt: skip

FEWER: Mapping[str, Mapping[str, Any]] = {  # each kind of layer stays, and a run takes half as long
    "sinks": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "channel_delta": {
        "num_hidden_layers": 4, "linear_attn_config.full_attn_layers": [4], "linear_attn_config.kda_layers": [1, 2, 3],
    },
    "head_delta": {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}  # fmt: skip

# word -> released config, what is put into it first, sizes of the twin: the word says what the twin is there for.
TWINS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "dense": ("qwen3_8b", {}, {}),
    "tied": ("smollm2_135m", {}, {}),
    "nvfp4": ("qwen3_30b_a3b", NVFP4, {}),
    "latent": ("deepseek_v3", {}, {"moe_intermediate_size": 160}),  # two by two scale blocks, ragged both ways
    "index": ("deepseek_v32", {}, {}),
    "index_long": ("deepseek_v32", {}, {}),
    "shared_index": ("glm_5_2", {}, {}),
    "sinks": ("gpt_oss_20b", {}, FEWER["sinks"]),
    "channel_delta": ("kimi_linear_48b_a3b", {}, FEWER["channel_delta"]),
    "head_delta": ("qwen3_5_35b_a3b", {}, FEWER["head_delta"]),
    "depth": ("kimi_k3", {}, {}),
    "depth_index": ("kimi_k3_1", {}, {}),
    # Heads' values are together as wide as the model; an eps behind which the norm of the experts' sum hides no scale.
    "depth_square": ("kimi_k3", {}, {"text_config.v_head_dim": 40, "text_config.rms_norm_eps": 1e-3}),
}
# A plain forward starts in a second, the library in several; where there is none, the recipe names the library's class.
ORACLES = {"tied": str(SCRIPTS / "plain_llama.py")}
ALIGNED = (
    "tied", "nvfp4", "latent", "index", "index_long", "shared_index", "sinks", "channel_delta", "head_delta", "depth",
    "depth_index", "depth_square",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """said: one line for every finding of the wanted verdict, or the error. caught: whether there is any line.

    named: whether one of them matches the fault's pattern.
    """

    fault: Fault
    said: tuple[str, ...]

    @property
    def caught(self) -> bool:
        return bool(self.said)

    @property
    def named(self) -> bool:
        return any(re.search(self.fault.names, line) for line in self.said)


@dataclass
class Stand:
    """root: a folder of its own. Twins and traces appear in it when they are first asked for."""

    root: Path
    _planted: int = field(default=0, init=False)

    def twin(self, word: str) -> Path:
        """The folder of an unmutated twin; never to be changed."""
        folder = self.root / "twins" / word
        if not folder.exists():
            name, more, sizes = TWINS[word]
            source = self.root / "configs" / word / "config.json"
            source.parent.mkdir(parents=True)
            source.write_text(json.dumps(json.loads((CONFIGS / f"{name}.json").read_text()) | dict(more)))
            folder.parent.mkdir(exist_ok=True)
            write_twin(str(source), str(folder), TwinOptions(changes=sizes))
        return folder

    def trace(self, word: str) -> Path:
        """The oracle's trace of the unmutated twin."""
        path = self.root / f"{word}.trace"
        if not path.exists():
            tokens = MORE_TOKENS.get(word, NUM_TOKENS)
            options = AlignOptions(record=str(path), num_tokens=tokens, threads=1, oracle=ORACLES.get(word))
            align_source(str(self.twin(word)), options)
        return path

    def record(self, words: Iterable[str] = ALIGNED, workers: int = 2) -> None:
        """Make the traces of ``words``, several oracles at a time: each is a process of its own."""
        list(map(self.twin, words))
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(self.trace, words))

    def copy(self, word: str) -> Path:
        """A copy of a twin that may be changed."""
        self._planted += 1
        return shutil.copytree(self.twin(word), self.root / "planted" / f"{self._planted:03}_{word}")

    def judge(self, fault: Fault) -> Outcome:
        """Plant the fault, run its command, take down what was said. Anything but a UserError is a crash and raised."""
        if fault.plant is not None:
            return Outcome(fault, self._align_port(fault))
        if fault.call is not None:
            return Outcome(fault, _call(fault, self.root / "configs" / fault.twin, self.twin(fault.twin)))
        assert fault.edit is not None
        folder = self.copy(fault.twin)
        try:
            fault.edit(folder)
            return Outcome(fault, said_of_folder(folder, fault))
        finally:
            shutil.rmtree(folder)

    def _align_port(self, fault: Fault) -> tuple[str, ...]:
        assert fault.plant is not None
        with ExitStack() as stack:
            bindings = fault.plant(stack)
            options = AlignOptions(trace=str(self.trace(fault.twin)), bindings=bindings, catalog=faulty(), threads=1)
            return _said(lambda: _aligned(str(self.twin(fault.twin)), options), fault)


def _aligned(folder: str, options: AlignOptions) -> list[Finding]:
    report = align_source(folder, options)
    first = f"first diverging: {report.first_diverging}" if report.first_diverging else ""
    found = list(report.findings)
    return found + ([Finding("first", "operator", "fail", first)] if first else [])


def said_of_folder(folder: Path, fault: Fault) -> tuple[str, ...]:
    """What the fault's command says of a changed checkpoint. A fault that nothing catches is given to each."""
    commands: dict[str, Callable[[], list[Finding]]] = {
        "inspect": lambda: inspect_source(str(folder)).findings,
        "load": lambda: loaded(folder),
    }
    wanted = list(commands) if fault.missed else [fault.run]
    return tuple(line for command in wanted for line in _said(commands[command], fault))


def loaded(folder: Path) -> list[Finding]:
    """The loading half of ``align`` (and of everything that runs a model): open, read and check every parameter."""
    model = open_model(str(folder), dtype=torch.float32)
    for prefix in ("embed", "final_norm", *(f"layers.{i}" for i in range(len(model.spec.layers)))):
        model.loader.load(prefix)
    if not model.spec.tie.tied:
        model.loader.load("head")
    return model.loader.findings


def _call(fault: Fault, config: Path, twin: Path) -> tuple[str, ...]:
    assert fault.call is not None
    call: dict[str, Any] = dict(fault.call)
    if fault.run == "plan":
        return _said(lambda: list(plan_source(str(twin), PlanOptions(**call)).findings), fault)
    return _said(lambda: _no_finding(write_twin(str(config), str(twin) + "_lost", TwinOptions(changes=call))), fault)


def _no_finding(made: object) -> list[Finding]:
    return []


def _said(run: Callable[[], list[Finding]], fault: Fault) -> tuple[str, ...]:
    try:
        found = run()
    except UserError as error:
        return (str(error),) if fault.verdict == "fail" else ()
    return tuple(_line(f) for f in found if f.verdict == fault.verdict)


def _line(finding: Finding) -> str:
    if finding.kind == "first":
        return finding.claim
    return f"{finding.kind}: {finding.claim} [{finding.measured}] {'; '.join(finding.evidence)}"


@lru_cache
def faulty() -> Catalog:
    """The catalog with every faulty operator as a variant of its contract, beside the reference."""
    catalog, given = CATALOG.copy(), set()
    for module in FAULTY:
        for contract, places in importlib.import_module(module).VARIANTS.items():
            traits = next(line.traits for line in CATALOG.lookup(contract) if line.variant == REFERENCE)
            for name, place in places.items():
                if (contract, name) not in given:
                    catalog.add(Line(contract, name, "any", (), place, traits))
                    given.add((contract, name))
    return catalog


def patched(stack: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by ``make(the original)`` until the stack closes."""
    original = getattr(owner, name)
    stack.callback(setattr, owner, name, original)
    setattr(owner, name, make(original))


def other_recipe(stack: ExitStack, change: Callable[[Recipe], Recipe]) -> None:
    """Let the model be opened with a changed recipe, as if a faulty one were given with ``--recipe``."""
    owner = importlib.import_module("dayzero.blocks.open")

    def make(find: Any) -> Any:
        return lambda config, given=None: change(find(config, given))

    patched(stack, owner, "require_recipe", make)


def other_spec(stack: ExitStack, change: Callable[[ModelSpec], ModelSpec]) -> None:
    def changed(recipe: Recipe) -> Recipe:
        make = recipe.make_spec

        def spec(raw: Any) -> ModelSpec:
            made = make(raw)
            after = change(made)
            assert after != made, "the fault changed nothing"
            return after

        return replace(recipe, make_spec=spec)

    other_recipe(stack, changed)
