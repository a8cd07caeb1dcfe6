"""A recipe given by path, with mistakes: each is one sentence or finding that names it, whatever it does on import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dayzero.arch.raw import Raw
from dayzero.errors import ModelError, UsageError, UserError
from dayzero.models.recipe import read_rules, read_spec
from dayzero.models.registry import load_recipe
from dayzero.planner.inspect import InspectReport, inspect_source
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.planner import plan_source
from tests.paper.inspect_checkpoints import table_of, write_folder
from tests.paper.test_inspect_findings import fails, small_dense

SOUND = "from dayzero.models.llama import *  # noqa\nfrom dayzero.models.llama import LAYER, RULES as SOUND, spec\n"
NORM = 'Rule(LAYER + "input_layernorm.weight", "layers.{i}.mixer_norm")'
RULES = f"RULES = tuple(r for r in SOUND if r != {NORM})"


def recipe(folder: Path, text: str) -> str:
    path = folder / "given.py"
    path.write_text(SOUND + text)
    return str(path)


def inspected(folder: Path, text: str) -> InspectReport:
    write_folder(folder / "model", small_dense(), table_of(small_dense()))
    return inspect_source(str(folder / "model"), recipe=recipe(folder, text))


NO_RECIPE = {
    "raise SystemExit(0)": "does not import: SystemExit",
    "import sys\nsys.exit('enough')": "does not import",
    "raise RuntimeError('no')": "does not import",
    "def broken(": "SyntaxError",
    "ARCHITECTURES = 'LlamaForCausalLM'": "ARCHITECTURES must be a tuple of names",
    "ARCHITECTURES = 5": "ARCHITECTURES must be a tuple of names",
    "ORACLE = 'LlamaForCausalLM'": "ORACLE must be",
    "TRAITS = ('hidden_size',)": "TRAITS must be",
    "TWIN = 5": "TWIN must",
}


@pytest.mark.parametrize("text", NO_RECIPE)
def test_a_file_that_is_no_recipe(text: str, tmp_path: Path) -> None:
    """One that ends the process must not end it as passed."""
    with pytest.raises(UsageError, match=NO_RECIPE[text]) as caught:
        load_recipe(recipe(tmp_path, text))
    assert caught.value.exit_code == 2


STOPS = ("return None", "raise SystemExit(0)", "raise NotImplementedError", "raise RuntimeError('x')", "return nothing")


@pytest.mark.parametrize("body", STOPS)
def test_a_spec_that_stops(body: str, tmp_path: Path) -> None:
    report = inspected(tmp_path, f"def spec(raw):\n    {body}\n")
    assert list(fails(report)) == ["config.value"]
    with pytest.raises(UserError) as caught:
        plan_source(str(tmp_path / "model"), PlanOptions("h100", recipe=str(tmp_path / "given.py")))
    assert caught.value.exit_code == 1


BAD_RULES = {
    "'a string',": "hold a str",
    "None,": "hold a NoneType",
    'Rule("a.{j}.b", "layers.{i}.mixer_norm"),': "no other braces",
    'Rule("a.{i}.{i}", "layers.{i}.mixer_norm"),': "each once",
    'Rule("a.b", "layers.{i}.mixer_norm"),': "on one side only",
    'Rule("a.{i}.{e}", "layers.{i}.mixer_norm"),': "numbers an expert on one side only",
    'Rule("a.{i}", "layers.{i}.mixer_norm[{e}]"),': "numbers an expert on one side only",
    'Rule("a.{i}.{e}", "layers.{i}.{e}.mixer_norm"),': "at the end of the parameter",
    'Rule("a.{i}", "layers.{i}.mixer_norm", stored=("d0", 2)),': "no other arrangement",
    'Rule("a.{i}", "layers.{i}.mixer_norm", stored=("d7",)),': "do not work out",
    'Fuse(("a.{i}", "b.{i}", "c.{i}", "d.{i}", "e.{i}"), "layers.{i}.mixer_norm"),': "does not divide",
    'Fuse(("a.{i}.{e}", "b.{i}.{e}"), "layers.{i}.mixer_norm[{e}]"),': "cannot be fused",
    'Narrow("a.{i}", "layers.{i}.mixer_norm", 3),': "shorter",
    'Split("a.{i}", ("layers.{i}.mixer.q", "layers.{i}.channel.down")),': "cannot hold parameters of the shapes",
    'Split("a.{i}", ("layers.{i}.mixer.q", "layers.{i}.mixer.k"), interleaved=True),': "cannot hold",
}


@pytest.mark.parametrize("rule", BAD_RULES)
def test_a_rule_that_could_fill_nothing(rule: str, tmp_path: Path) -> None:
    text = f"from dayzero.checkpoint.rules import Fuse, Narrow, Split\n{RULES} + ({rule})\n"
    report = inspected(tmp_path, text)
    assert list(fails(report)) == ["recipe.rules"] and BAD_RULES[rule] in fails(report)["recipe.rules"].claim
    with pytest.raises(ModelError):
        plan_source(str(tmp_path / "model"), PlanOptions("h100", recipe=str(tmp_path / "given.py")))


def test_a_tensor_that_two_rules_read(tmp_path: Path) -> None:
    """Both parameters are filled and no tensor is left over: only the rules show that one norm stands for two."""
    made = load_recipe(
        recipe(tmp_path, f'{RULES} + (Rule(LAYER + "post_attention_layernorm.weight", "layers.{{i}}.mixer_norm"),)')
    )
    expansion = read_rules(made, read_spec(made, Raw(small_dense())))[1]
    assert expansion.without_rule == expansion.filled_twice == []
    assert expansion.used_twice[0] == "model.layers.0.post_attention_layernorm.weight"
    table = {n: t for n, t in table_of(small_dense()).items() if "input_layernorm" not in n}
    write_folder(tmp_path / "model", small_dense(), table)
    report = inspect_source(str(tmp_path / "model"), recipe=str(tmp_path / "given.py"))
    assert list(fails(report)) == ["recipe.used_twice"]
    with pytest.raises(ModelError, match="twice"):
        plan_source(str(tmp_path / "model"), PlanOptions("h100", recipe=str(tmp_path / "given.py")))


def test_a_dead_rule_is_a_note_when_the_recipe_is_given(tmp_path: Path) -> None:
    text = 'RULES = (*SOUND, Rule("model.layers.{i}.self_attn.q_nrom.weight", "layers.{i}.mixer.q_nrom"))\n'
    report = inspected(tmp_path, text)
    dead = next(f for f in report.findings if f.kind == "recipe.dead_rule")
    assert dead.verdict == "note" and report.verdict == "note"
    assert any("q_nrom" in line for line in dead.evidence)
    assert not [f for f in inspect_source(str(tmp_path / "model")).findings if f.kind == "recipe.dead_rule"]


def test_the_recipe_alone_is_sound(tmp_path: Path) -> None:
    report = inspected(tmp_path, "RULES = SOUND\n")
    assert report.verdict == "note" and fails(report) == {}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["hidden_size"] == small_dense()["hidden_size"]
