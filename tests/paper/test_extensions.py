"""Entry points of packages outside the tree, on paper: what loads, and one sentence for each way in which none does."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dayzero.cli import main
from dayzero.errors import UsageError
from dayzero.extensions import named_object, points_of
from dayzero.hardware import HARDWARE, Hardware, load_hardware_entry_points, parse_hardware
from dayzero.models.registry import load_recipe
from dayzero.ops.bindings import bound_uses, parse_bindings
from dayzero.ops.catalog import CATALOG

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 300, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
}  # fmt: skip
SYNTAX = "def broken(:\n"
RAISES = "raise RuntimeError('no licence\\nfound')\n"
RECORD = (
    "from dayzero.hardware import Hardware\n"
    "HARDWARE = Hardware('{}', 10**9, 1e9, 1e9, {{'bf16': 1e12}}, target='cpu')\n"
)
GROUPS = {"models": ("inspect",), "operators": ("inspect",), "hardware": ("plan", "--hardware", "cpu")}


def install(site: Path, monkeypatch: pytest.MonkeyPatch, group: str, value: str, **modules: str) -> None:
    """A package ``acme-kit`` on the path with one entry point ``acme``, and its modules' text."""
    info = site / "acme_kit-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kit\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[dayzero.{group}]\nacme = {value}\n")
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(site))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.mark.parametrize("group", list(GROUPS))
@pytest.mark.parametrize(
    ("value", "text", "words"),
    [
        ("acme_gone_{}", "", "does not import"),
        ("acme_syntax_{}", SYNTAX, "does not import (SyntaxError"),
        ("acme_raises_{}", RAISES, "does not import (RuntimeError: no licence found)"),
        ("acme_lacks_{}:missing", "x = 1\n", "does not import (AttributeError"),
    ],
)
def test_a_package_that_does_not_load_is_one_sentence(
    group: str, value: str, text: str, words: str, config: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    value = value.format(group)
    modules = {value.partition(":")[0]: text} if text else {}
    install(tmp_path / "site", monkeypatch, group, value, **modules)
    command, *flags = GROUPS[group]
    assert main([command, config, *flags]) == 2
    said = capsys.readouterr()
    assert words in said.err and "Traceback" not in said.err and not said.out
    assert f"package 'acme-kit': entry point acme = {value} of dayzero.{group}" in " ".join(said.err.split())


@pytest.mark.parametrize(
    ("group", "text", "words"),
    [
        ("models", "x = 1\n", "has no ARCHITECTURES, spec, RULES"),
        ("operators", "x = 1\n", "has no register(catalog)"),
        ("operators", "def register(catalog): catalog.nothing()\n", "stops when it is called (AttributeError"),
        (
            "operators",
            "from dayzero.ops.catalog import Line\n"
            "def register(catalog): catalog.add(Line('norm.l2', 'reference', 'any', (), 'x:y'))\n",
            "has two variants named 'reference'",
        ),
        ("hardware", "HARDWARE = 3\n", "gives no Hardware record, but int"),
        ("hardware", "def HARDWARE(): return 1 / 0\n", "stops when it is called (ZeroDivisionError"),
        ("hardware", RECORD.format("h200"), "the accelerator 'h200' is given by dayzero itself too"),
    ],
)
def test_a_package_that_loads_and_is_wrong_is_one_sentence(
    group: str, text: str, words: str, config: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    module = f"acme_wrong_{abs(hash((group, text)))}"
    install(tmp_path / "site", monkeypatch, group, module, **{module: text})
    command, *flags = GROUPS[group]
    assert main([command, config, *flags]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said and "package 'acme-kit'" in said


def test_device_records_come_from_modules_functions_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RECORD.format("acme1") + "def make():\n    return HARDWARE\n"
    install(tmp_path / "site", monkeypatch, "hardware", "acme_chips", acme_chips=text)
    for value in ("acme_chips", "acme_chips:make", "acme_chips:HARDWARE"):
        known = load_hardware_entry_points([EntryPoint("acme1", value, "dayzero.hardware")])
        assert set(known) == {*HARDWARE, "acme1"}
        record, count = parse_hardware("acme1x4", known)
        assert isinstance(record, Hardware) and (record.name, record.target, count) == ("acme1", "cpu", 4)
    assert [point.name for point in points_of("dayzero.hardware")] == ["acme"] and "acme1" not in HARDWARE
    twice = [EntryPoint(n, "acme_chips", "dayzero.hardware") for n in ("a", "b")]
    with pytest.raises(UsageError, match="is given by package .* too; rename"):
        load_hardware_entry_points(twice)


def test_a_recipe_named_as_a_module_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="no .py file, and as a module it does not import"):
        load_recipe("nova")


def test_bindings_are_parsed() -> None:
    given = ["attention.causal=tiled", "linear.matmul@layers.0.mixer.q=torch_cpu"]
    assert parse_bindings(given) == {"attention.causal": "tiled", "linear.matmul@layers.0.mixer.q": "torch_cpu"}
    for wrong in ("tiled", "=tiled", "norm.rms=", "norm.rms@=x", "@a=b"):
        with pytest.raises(UsageError, match="give CONTRACT=VARIANT"):
            parse_bindings([wrong])
    with pytest.raises(UsageError, match="is bound to 'a' already"):
        parse_bindings(["norm.rms=a", "norm.rms=b"])


def test_a_binding_must_fit_the_options_of_its_site() -> None:
    from dayzero.decl import OpUse

    uses = [OpUse("attention.causal", f"layers.{i}.mixer.attend", (("sinks", i == 1),)) for i in range(2)]
    here = "attention.causal@layers.0.mixer.attend"
    assert bound_uses({here: "torch_cpu"}, uses, CATALOG) == {here: "torch_cpu"}
    assert len(bound_uses({"attention.causal": "tiled"}, uses, CATALOG)) == 2
    with pytest.raises(UsageError, match=r"layers.1.mixer.attend: variant 'torch_cpu' does not fit.*sinks"):
        bound_uses({"attention.causal": "torch_cpu"}, uses, CATALOG)


def test_a_named_object_is_found_or_an_error() -> None:
    assert named_object("dayzero.hardware:HARDWARE") is HARDWARE
    with pytest.raises(AttributeError):
        named_object("dayzero.hardware:NOTHING")
