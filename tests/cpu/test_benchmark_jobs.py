"""``benchmarks/jobs``: what a window on a GPU would run names only what is there."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.models import MODELS
from dayzero.ops.bench.__main__ import entries
from dayzero.ops.catalog import CATALOG

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "benchmarks" / "jobs"
SCRIPTS = ("check.sh", "time.sh")
OWN_WORDS = {"and", "or", "not"}


@functools.cache
def entry_names() -> tuple[str, ...]:
    return tuple(entry.name for entry in entries())


@functools.cache
def parity_ids() -> str:
    return "\n".join("-".join(key) for key in CATALOG.lines)


def commands(text: str) -> list[str]:
    """Its lines, without comments, continued ones in one."""
    joined = text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def given(words: list[str], *options: str) -> Iterator[str]:
    """What stands behind one of these options."""
    return (word for option, word in itertools.pairwise(words) if option in options)


def faults_of_command(line: str) -> Iterator[str]:
    for path in re.findall(r"(?<![\w./])(?:tests|benchmarks)/[\w./]+\.(?:py|json)", line):
        if not (ROOT / path).is_file():
            yield f"there is no {path}"
    if not any(
        word in line for word in ("pytest", "dayzero.ops.bench", "benchmarks/models.py", "benchmarks/streams.py")
    ):
        return
    words = shlex.split(line)
    if "dayzero.ops.bench" in words:
        for pattern in given(words, "--only"):
            if not any(fnmatch.fnmatch(name, f"*{pattern}*") for name in entry_names()):
                yield f"no entry has {pattern!r} in its name"
        yield from (f"no entry is named {name!r}" for name in given(words, "--named") if name not in entry_names())
    elif "pytest" in words:
        files = [word for word in words if word.startswith("tests/")]
        text = "".join((ROOT / file).read_text() for file in files if (ROOT / file).is_file())
        text += parity_ids() if "tests/gpu/test_parity.py" in files else ""
        for word in {w for chosen in given(words, "-k") for w in re.findall(r"[\w.-]+", chosen)} - OWN_WORDS:
            if word not in text:
                yield f"-k {word}: in none of {' '.join(files)}"
    else:
        models = [name for names in given(words, "--only") for name in names.split(",")]
        yield from (f"there is no model {name!r}" for name in models if name not in MODELS)


def faults_of_script(script: Path) -> Iterator[str]:
    told = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    if told.returncode:
        yield told.stderr.strip()
    text = script.read_text()
    for name in re.findall(r"\$here/([\w.]+)", text):
        if not (script.parent / name).is_file():
            yield f"there is no {name} beside it"
    for line in commands(text):
        yield from faults_of_command(line)


def faults_of(job: Path) -> list[str]:
    scripts = [job / name for name in SCRIPTS if (job / name).is_file()]
    found = [] if scripts else [f"{job.name}: neither {' nor '.join(SCRIPTS)}"]
    for script in scripts:
        found += [f"{job.name}/{script.name}: {fault}" for fault in faults_of_script(script)]
    for path in job.glob("*.py"):
        try:
            compile(path.read_text(), str(path), "exec")
        except SyntaxError as error:
            found.append(f"{job.name}/{path.name}: {error}")
    return found


def folders() -> list[Path]:
    return [path for path in sorted(JOBS.iterdir()) if path.is_dir() and path.name != "__pycache__"]


@pytest.mark.parametrize("job", folders(), ids=lambda job: job.name)
def test_a_job_names_what_is_there(job: Path) -> None:
    assert faults_of(job) == []


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("if true; then\n", "syntax error"),
        ("python3 -m pytest -q tests/gpu/test_nothing.py\n", "there is no tests/gpu/test_nothing.py"),
        ('python3 -m pytest tests/gpu/test_parity.py -k "linear or no_such"\n', "-k no_such"),
        ('python3 -m dayzero.ops.bench --only "linear.matmul*fp7 M="\n', "no entry has 'linear.matmul*fp7 M='"),
        ('[ -z "$1" ] || python3 -m dayzero.ops.bench \\\n  --named "latent.attend"\n', "no entry is named"),
        ("python3 benchmarks/streams.py --only qwen3_8b,qwen3_9b\n", "there is no model 'qwen3_9b'"),
        ("python3 benchmarks/nothing.py\n", "there is no benchmarks/nothing.py"),
        ('python3 "$here/sweep.py" few\n', "there is no sweep.py beside it"),
    ],
)
def test_a_wrong_script_is_told(tmp_path: Path, script: str, fault: str) -> None:
    (tmp_path / "time.sh").write_text(script)
    assert any(fault in one for one in faults_of(tmp_path)), faults_of(tmp_path)


def test_an_empty_job_and_wrong_python_are_told(tmp_path: Path) -> None:
    (tmp_path / "case.py").write_text("def case(:\n")
    assert [fault.split(": ")[0].split("/")[-1] for fault in faults_of(tmp_path)] == [tmp_path.name, "case.py"]


def test_every_file_of_tests_for_a_gpu_is_run_whole_by_a_job() -> None:
    lines = [line for path in JOBS.glob("gpu_*/check.sh") for line in commands(path.read_text())]
    named = {file for line in lines for file in re.findall(r"tests/gpu/(test_\w+\.py)", line)}
    assert named == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


def test_the_last_part_of_parity_is_what_the_others_leave() -> None:
    chosen = []
    for number in (1, 2, 3, 4):
        lines = commands((JOBS / f"gpu_parity_{number}" / "check.sh").read_text())
        chosen += [word for line in lines if "pytest" in line for word in given(shlex.split(line), "-k")]
    assert chosen[3] == f"not ({' or '.join(chosen[:3])})"


def test_the_table_of_jobs_has_them_all() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", (JOBS / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == [job.name for job in folders()]
