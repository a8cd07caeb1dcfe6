"""The package's structure: heights, paper files, names, edges, sizes. Each rule is shown to catch a planted fault."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from structure_rules import (
    BROAD_EXCEPT_ALLOWED,
    DEVICE_FILES,
    DEVICE_PACKAGES,
    HEIGHTS,
    LATE_IMPORT_ALLOWED,
    PACKAGE,
    check_package,
    check_text,
    is_paper,
    model_name_in,
)

REPOSITORY = Path(__file__).resolve().parents[1]
ROOT = REPOSITORY / PACKAGE
LONG_FUNCTION = "def f():\n" + "    pass\n" * 60
SMALL = {"units.py": "", "errors.py": "", "decl.py": "", "arch/__init__.py": "", "arch/spec.py": "", "ops/norm.py": ""}

PLANTED = [
    ("arch/a.py", "from dayzero.planner import show\n", "stands above arch"),
    ("arch/a.py", "def f():\n    import dayzero.engine.loop\n", "stands above arch"),
    ("arch/a.py", "from ..engine import loop\n", "stands above arch"),
    ("arch/a.py", "import importlib\nimportlib.import_module('dayzero.engine.loop')\n", "stands above arch"),
    ("ops/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dayzero.cli\n", "stands above ops"),
    ("ops/a.py", "from dayzero import arch\n", "do not import each other"),
    ("ops/a.py", "from dayzero.arch.spec import LayerSpec\n", "do not import each other"),
    ("acceptance/a.py", "import dayzero.server.app\n", "do not import each other"),
    ("units.py", "from dayzero.decl import Cut\n", "may import"),
    ("console.py", "from dayzero.decl import Cut\n", "may import"),
    ("cellar/a.py", "x = 1\n", "has no height"),
    ("__init__.py", "from dayzero.units import round_up\n", "imports nothing of its rooms"),
    ("__init__.py", "try:\n    from dayzero.units import up\nfinally:\n    pass\n", "imports nothing of its rooms"),
    ("arch/__init__.py", "def f():\n    from dayzero.engine import loop\n", "stands above arch"),
    ("ops/a.py", "from tests.cpu import helpers\n", "nothing imports tests"),
    ("oracles/a.py", "from dayzero.units import round_up\n", "imports nothing of dayzero"),
    ("acceptance/a.py", "import dayzero.oracles.a\n", "run by path"),
    ("arch/a.py", "import torch\n", "a paper file imports torch"),
    ("arch/a.py", "def f():\n    from torch import nn\n", "a paper file imports torch"),
    ("models/a.py", "import torch.nn.functional as F\n", "a paper file imports torch"),
    ("planner/a.py", "def f():\n    import transformers\n", "a paper file imports transformers"),
    ("planner/detect.py", "import torch\n", "a paper file imports torch"),
    ("checkpoint/index.py", "from safetensors.torch import load_file\n", "a paper file imports safetensors.torch"),
    ("checkpoint/index.py", "from safetensors import torch\n", "a paper file imports safetensors.torch"),
    ("planner/a.py", "def f():\n    from dayzero.ops import norm\n", "which is no paper file"),
    ("blocks/a.py", "NAMES = ['DeepseekV3ForCausalLM']\n", "model name 'deepseek'"),
    ("blocks/a.py", "def load_qwen3(): ...\n", "model name 'qwen'"),
    ("blocks/a.py", "x = f'{1} glm-5'\n", "model name 'glm'"),
    ("blocks/a.py", "x.is_gpt_oss = True\n", "model name 'gpt_oss'"),
    ("blocks/a.py", "f(KimiLinear=1)\n", "model name 'kimi'"),
    ("blocks/a.py", "from dayzero.models import llama\n", "model name 'llama'"),
    ("blocks/gemma.py", "x = 1\n", "model name 'gemma'"),
    ("blocks/a.py", "import os\nx = os.environ['HOME']\n", "os.environ"),
    ("blocks/a.py", "from os import getenv\n", "os.getenv"),
    ("blocks/a.py", "try:\n    f()\nexcept:\n    pass\n", "broad except"),
    ("blocks/a.py", "try:\n    f()\nexcept Exception as e:\n    raise\n", "broad except"),
    ("blocks/a.py", "try:\n    f()\nexcept (OSError, BaseException):\n    raise\n", "broad except"),
    ("blocks/a.py", "with contextlib.suppress(Exception):\n    f()\n", "broad suppress"),
    ("blocks/a.py", "x = 1\n" * 401, "401 lines"),
    ("blocks/a.py", LONG_FUNCTION, "f has 61 lines"),
    ("blocks/a.py", "class A:\n" + "".join(f"    {line}\n" for line in LONG_FUNCTION.splitlines()), "f has 61 lines"),
    ("blocks/a.py", "def f(a, b, c, /, d, e, *, g, h, i, j): ...\n", "f has 9 parameters"),
    ("blocks/a.py", "@jit\n" + LONG_FUNCTION, "f has 61 lines"),
    ("ops/triton/a.py", "def f(a, b, c, /, d, e, *, g, h, i, j): ...\n", "f has 9 parameters"),
    ("ops/triton/a.py", "@triton.jit\ndef f():\n" + "    pass\n" * 140, "f has 141 lines"),
    ("blocks/a.py", "class A: ...\nclass B(A): ...\nclass C(B): ...\n", "class C is 3 deep"),
]

CLEAN = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dayzero.ops.norm import rms_norm\n"
    "def __getattr__(name):\n    from dayzero.ops import norm\n    return norm\n",
    "arch/a.py": "from typing import TYPE_CHECKING\nfrom dayzero.units import round_up\nfrom dayzero.arch import spec\n"
    "if TYPE_CHECKING:\n    from torch import Tensor\n",
    "blocks/a.py": '"""As the DeepSeek-V3 paper has it."""\nimport torch\nfrom dayzero.ops.norm import rms_norm\n'
    "# Qwen does the same\nKIND = 'llama3'\ntry:\n    f()\nexcept (OSError, ValueError):\n    pass\n"
    + LONG_FUNCTION.replace("    pass\n", "", 1),
    "planner/detect.py": "def f():\n    import torch\n",
    "models/llama.py": "ARCHITECTURES = ('LlamaForCausalLM',)\n",
    "cli.py": "import os\nfrom dayzero import demo\nx = os.environ\n",
    "demo.py": "NAME = 'smollm'\n",
    "commands/frame.py": "try:\n    f()\nexcept Exception:\n    pass\n",
    "oracles/a.py": "import torch\nNAME = 'KimiK3'\n",
    "ops/triton/a.py": "@triton.jit\ndef f(a, b, c, d, e, f, g, h, i):\n" + "    pass\n" * 100,
    "ops/a.py": "class A:\n    def f(self, a, b, c, d, e, g, h, i): ...\nclass B(A): ...\n",
}


def _lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in (SMALL | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(("name", "text", "expected"), PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, name: str, text: str, expected: str) -> None:
    found = check_package(_lay(tmp_path, {name: text}))
    assert [line for line in found if expected in line and line.startswith(f"{name}:")], found


def test_clean_files_pass(tmp_path: Path) -> None:
    assert check_package(_lay(tmp_path, CLEAN)) == []


@pytest.mark.parametrize("text", ["LlamaForCausalLM", "my_qwen", "QWEN3", "gpt-oss-20b", "ANovaLlamaThing", "GptOss"])
def test_model_names_are_seen(text: str) -> None:
    assert model_name_in(text)


@pytest.mark.parametrize("text", ["collamas", "angler", "engagement", "glamour", "norm_topk"])
def test_other_words_are_not_model_names(text: str) -> None:
    assert not model_name_in(text)


def test_the_package_keeps_the_structure() -> None:
    found = check_package(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_paper_files_import_without_torch() -> None:
    """All paper modules in one fresh interpreter in which importing torch or transformers is an error."""
    names = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    paper = [name for name in names if is_paper(name)]
    assert {"errors.py", "arch/__init__.py", "planner/__init__.py"} <= set(paper)
    dotted = [".".join([PACKAGE, *name.removesuffix(".py").split("/")]).removesuffix(".__init__") for name in paper]
    program = (
        "import sys, json, importlib\n"
        f"for name in {sorted(DEVICE_PACKAGES)!r}: sys.modules[name] = None\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print('imported')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps([*dotted, f"{PACKAGE}.cli"])],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr[-2000:]


def test_the_tables_name_things_that_exist() -> None:
    """An exemption for a file that has gone is a hole that nobody sees."""
    rooms = {
        path.name.removesuffix(".py") for path in ROOT.iterdir() if path.name[0] != "_" and path.suffix in ("", ".py")
    }
    assert set(HEIGHTS) - {"__main__"} <= rooms
    for name in LATE_IMPORT_ALLOWED | DEVICE_FILES | set(BROAD_EXCEPT_ALLOWED):
        assert (ROOT / name).is_file(), name


def test_paper_tests_do_not_import_torch() -> None:
    for path in (REPOSITORY / "tests" / "paper").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & DEVICE_PACKAGES, path.name


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by it: of two that are collected together, the second is an error."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize("folder", ["work", "root", "tmp", "opt", "home/user"])
def test_a_machine_path_is_found(folder: str) -> None:
    assert check_text("a.md", f"see /{folder}/x for it")
    assert not check_text("a.md", f"see ~/{folder}/x, $HOME/{folder}/x or frame/{folder}/x")


def test_a_registry_host_is_found() -> None:
    host = ".".join(("files", "python" + "hosted", "org"))
    assert check_text("a.txt", f"https://{host}/x.whl")


def test_tracked_files_name_no_machine() -> None:
    found = []
    for path in _tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += check_text(path.relative_to(REPOSITORY).as_posix(), text)
    assert not found, "\n" + "\n".join(found)


def _tracked() -> list[Path]:
    """Files git knows or would add; outside a clone, every file of the folders that are shipped."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return [p for top in (PACKAGE, "tests", "docs") for p in (REPOSITORY / top).rglob("*") if p.suffix in _TEXT]
    return [path for name in listed.split("\0") if name and (path := REPOSITORY / name).is_file()]


_TEXT = {".py", ".md", ".toml", ".txt"}
