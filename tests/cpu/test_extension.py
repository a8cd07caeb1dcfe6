"""A package outside the tree, installed and used: its family, operators, blocks and device reach every command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "tests" / "data" / "nova_package"
CONFIG = {
    "architectures": ["NovaForCausalLM"], "model_type": "nova", "dtype": "bfloat16", "hidden_size": 1024,
    "num_hidden_layers": 12, "vocab_size": 32000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "rope_theta": 10000.0, "mean_width": 768,
    "mean_window": 128, "intermediate_size": 4096, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
SITE = "average.window@layers.2.mixer.average"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds the installed package; a copy is built, so that nothing is written beside its source."""
    source = tmp_path_factory.mktemp("source") / "nova"
    target = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    if find_spec("pip") and find_spec("setuptools"):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=300)
    else:
        install_by_hand(source, target)
    return target


def install_by_hand(source: Path, target: Path) -> None:
    """What an installer leaves behind, for environments without one."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    shutil.copytree(source / "src", target, dirs_exist_ok=True)
    info = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


def dayzero(installed: Path | None, *arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit code, the JSON object) of one command in a fresh process."""
    paths = [str(installed)] if installed else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(REPOSITORY)])}
    command = [sys.executable, "-m", "dayzero", *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("release") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(scope="module")
def twin(installed: Path, config: str) -> str:
    out = Path(config).parent / "twin"
    assert dayzero(installed, "twin", config, str(out))[0] == 0
    return str(out)


def test_without_the_package_nothing_knows_the_family(config: str) -> None:
    code, report = dayzero(None, "inspect", config)
    assert code == 1 and report["family"] is None and report["nearest"]
    code, report = dayzero(None, "plan", config, "--hardware", "novachip")
    assert code == 2 and "novachip" in json.dumps(report)


def test_inspect_reads_the_family_and_reuses_the_operators(installed: Path, twin: str) -> None:
    code, report = dayzero(installed, "inspect", twin)
    assert (code, report["verdict"], report["family"]) == (0, "pass", "nova")
    reused = {entry["contract"]: entry for entry in report["operators"]["reuse"]}
    assert reused["average.window"]["variants"] == ["reference", "running", "short"]
    assert "activation.relu_squared" in reused
    assert not report["operators"]["extend"] and not report["operators"]["build"]
    assert [layer["mixer"] for layer in report["layers"]] == ["mean window 6", "attention"] * 2
    assert report["layers"][0]["channel"] == "squared 56"


def test_plan_knows_the_device(installed: Path, config: str) -> None:
    code, report = dayzero(installed, "plan", config, "--hardware", "novachipx4")
    assert (code, report["verdict"], report["family"]) == (0, "pass", "nova")
    assert report["hardware"] == {"name": "novachip", "devices": 4} and report["exactly_once"]["holds"]


def test_align_runs_the_blocks_and_a_bound_variant(installed: Path, twin: str) -> None:
    code, report = dayzero(installed, "align", twin, "--bind", f"{SITE}=running")
    assert (code, report["verdict"]) == (0, "pass") and report["oracle"]["name"].startswith("plain forward of the Nova")
    assert report["bindings"] == {SITE: "running"}
    assert {"layers.0.mixer", "layers.0.channel", "layers.2.mixer"} <= {site["site"] for site in report["sites"]}


def test_align_names_the_site_of_a_variant_that_is_wrong(installed: Path, twin: str) -> None:
    """Only if the variant really ran can its fault be seen, and only at the one site it was bound to."""
    code, report = dayzero(installed, "align", twin, "--bind", f"{SITE}=short")
    assert (code, report["verdict"], report["first_diverging"]) == (1, "fail", "layers.2.mixer")
    failed = {site["site"] for site in report["sites"] if site["verdict"] == "fail"}
    assert failed and all(site.startswith("layers.2") for site in failed)  # each layer starts from the oracle's stream


ANSWER = """
import json, sys
from dayzero import LLM, SamplingParams
with LLM(sys.argv[1], pool_bytes=1 << 24) as llm:
    pieces = list(llm.stream("Hello", SamplingParams(temperature=0, max_tokens=8)))
    (whole,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8))
    bindings = llm.info.facts["bindings"]
print(json.dumps({"bindings": bindings, "streamed": "".join(p.text for p in pieces), "whole": whole.text}))
"""


def test_an_answer_runs_the_packages_operators(installed: Path, twin: str) -> None:
    """Of a seeded model: any text. Its own contract has no variant for this machine, ours have."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), str(REPOSITORY)])}
    command = [sys.executable, "-c", ANSWER, twin]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["streamed"] == said["whole"]
    assert any(key.startswith("linear.matmul@") for key in said["bindings"])
    alone = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert alone.returncode != 0 and "write a recipe" in alone.stderr  # without the package nobody knows it


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("average.window=fast", "no variant 'fast'"),
        ("average.window@layers.1.mixer.average=running", "meets no operator"),
        ("average.window", "give CONTRACT=VARIANT"),
    ],
)
def test_a_binding_that_cannot_be_met_is_refused(installed: Path, twin: str, binding: str, words: str) -> None:
    code, report = dayzero(installed, "align", twin, "--bind", binding)
    assert code == 2 and words in json.dumps(report)


def test_the_variant_holds_the_bound_of_its_contract(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity as for our own variants: the package's cases, its contract's bound; the wrong variant must fail them."""
    import importlib

    from dayzero.ops.contract import CONTRACTS, relative_l2

    monkeypatch.syspath_prepend(str(installed))
    before = dict(CONTRACTS)
    try:
        ops = importlib.import_module("nova_dayzero.ops")
        errors: dict[str, list[bool]] = {"running": [], "short": []}
        for case in ops.CASES["average.window"]:
            inputs = case.make(3)
            want = ops.window_mean(**inputs)
            bound = ops.window_mean.bound["bf16" if str(want.dtype) == "torch.bfloat16" else "f32"].value
            for name, seen in errors.items():
                seen.append(relative_l2(getattr(ops, f"window_mean_{name}")(**inputs), want) <= bound)
        assert all(errors["running"]) and not all(errors["short"])
    finally:
        CONTRACTS.clear()
        CONTRACTS.update(before)
        for name in [n for n in sys.modules if n.partition(".")[0] == "nova_dayzero"]:
            del sys.modules[name]
