"""``dayzero bench`` as a user runs it: on a running server, on a checkpoint it serves itself, and without HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from dayzero.cli import main
from dayzero.commands.bench import BenchArguments, _engine_options
from dayzero.commands.serve import API_KEY
from dayzero.rehearse.twin import write_twin
from tests.cpu.cli_support import run_json
from tests.paper.server_support import ScriptedEngine, make, serving, write_folder

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
SMALL = ("--requests", "3", "--prompt-tokens", "9:12", "--output-tokens", "3:5", "--concurrency", "1,2")


def fast(**more: Any) -> ScriptedEngine:
    return ScriptedEngine(reply=lambda request: [65] * 100, cached=0, **more)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(make(fast())) as address:
        yield address


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twin")
    (folder / "config.json").write_text((CONFIGS / "qwen3_8b.json").read_text())
    write_twin(str(folder / "config.json"), str(folder / "twin"))
    return folder / "twin"


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_running_server_is_measured(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = ran(capsys, url, *SMALL, "--repeats", "2")
    assert code == 0 and found["verdict"] == "pass", found
    assert (found["model"], found["how"], found["prompts"]) == ("tiny", "http", "ids")
    assert [level["level"] for level in found["levels"]] == ["c=1", "c=2"]
    for level in found["levels"]:
        assert [(one["requests"], one["errors"]) for one in level["runs"]] == [(3, 0)] * 2
        assert all(27 <= one["prompt_tokens"] <= 36 and 9 <= one["output_tokens"] <= 15 for one in level["runs"])
        assert all(value is None or value >= 0 for value in level["median"].values())
        assert level["median"]["ttft_p50_ms"] > 0 and level["median"]["output_tok_s"] > 0


def test_chat_and_text_and_an_open_loop(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_folder(tmp_path)
    few = ("--requests", "3", "--prompt-tokens", "30", "--output-tokens", "4", "--rate", "50")
    for more in (("--api", "chat"), ("--prompts", "text"), ("--prompts", "text", "--shared-prefix", "8")):
        code, found = ran(capsys, url, *few, *more, "--tokenizer", str(tmp_path))
        assert code == 0 and found["prompts"] == "text", found
        assert found["levels"][0]["level"] == "rate=50/s" and found["levels"][0]["median"]["output_tokens"] == 12


def test_the_table_names_what_was_measured(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", url, *SMALL]) == 0
    out = capsys.readouterr().out
    for words in ("pass: ", "9:12 prompt tokens (ids), 3:5 answer tokens", "ttft ms p50/p90/p99", "c=1", "c=2"):
        assert words in out


def test_a_server_that_ends_early_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(make(ScriptedEngine(reply=lambda request: [65]))) as address:
        code, found = ran(capsys, address, *SMALL)
    assert code == 1
    assert {f["kind"] for f in found["findings"] if f["verdict"] == "fail"} == {"load.tokens"}
    assert "2 answer tokens instead of" in found["findings"][0]["measured"]


def test_a_baseline_passes_itself_and_fails_a_slower_server(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "base.json")
    assert ran(capsys, url, *SMALL, "--out", file)[0] == 0
    slow = make(fast(delay=0.03))
    with serving(slow) as address:
        code, found = ran(capsys, address, *SMALL, "--baseline", file)
    assert code == 1
    failed = [f["claim"] for f in found["findings"] if f["verdict"] == "fail"]
    assert "c=1: output tok/s is not worse than the baseline" in failed, found["findings"]
    # the other way round the same change is an improvement
    with serving(slow) as address:
        assert ran(capsys, address, *SMALL, "--out", file)[0] == 0
    assert ran(capsys, url, *SMALL, "--baseline", file)[0] == 0


def test_a_key_is_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = make(fast(), api_keys=("secret",))
    with serving(guarded) as address:
        assert ran(capsys, address, *SMALL)[0] == 2
        assert ran(capsys, address, *SMALL, "--api-key", "secret")[0] == 0
        monkeypatch.setenv(API_KEY, "secret")
        assert ran(capsys, address, *SMALL)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["http://10.0.0.1:8000"], 2, "--allow-remote"),
        (["URL", "--page-tokens", "16"], 2, "--page-tokens"),
        (["URL", "--no-prefix-cache"], 2, "--no-prefix-cache"),
        (["URL", "--in-process"], 2, "--in-process"),
        (["here", "--allow-remote"], 2, "--allow-remote"),
        (["URL", "--concurrency", "1,x"], 2, "--concurrency 1,x"),
        (["URL", "--concurrency", "0"], 2, "--concurrency 0"),
        (["URL", "--concurrency", "2,2"], 2, "twice"),
        (["URL", "--rate", "nan"], 2, "--rate nan"),
        (["URL", "--prompt-tokens", "9:3"], 2, "--prompt-tokens 9:3"),
        (["URL", "--api", "x"], 2, "--api x"),
        (["URL", "--api", "chat"], 2, "--tokenizer"),
        (["URL", "--api", "chat", "--prompts", "ids"], 2, "--prompts ids"),
        (["URL", "--extra-body", "[1]"], 2, "--extra-body"),
        (["URL", "--plot", "a.svg"], 2, ".png"),
        (["URL", "--out", "no/folder/a.json"], 2, "folder"),
        (["URL", "--baseline", "none.json"], 2, "none.json"),
        (["URL", "--prompt-tokens", "1999:1999", "--output-tokens", "9"], 2, "2008"),
        (["URL", "--model", "other", *SMALL], 2, "other"),
        (["http://127.0.0.1:9"], 2, "no server answers"),
    ],
)
def test_wrong_calls_are_one_sentence(
    url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    got, found = ran(capsys, *(url if one == "URL" else one for one in arguments))
    assert (got, found["error"]["exit_code"]) == (code, code), found
    assert said in found["error"]["message"]


def test_a_plot_without_its_package_is_said_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dayzero.acceptance.load.plot.find_spec", lambda name: None)
    code, found = ran(capsys, "http://127.0.0.1:9", "--plot", "a.png")
    assert code == 3 and "pip install 'dayzero[plot]'" in found["error"]["message"]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="the extra `plot` is not installed")
def test_a_plot_is_a_picture(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ran(capsys, url, *SMALL, "--repeats", "2", "--plot", str(tmp_path / "a.png"))[0] == 0
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_options_of_the_engine_reach_its_command_line() -> None:
    """Whatever option an engine has: written down and read again by the command line of serve, it is the same."""
    given = BenchArguments(
        source="x", recipe=Path("r.py"), dtype="float32", max_running=3, pool_bytes="1MiB", no_prefix_cache=True,
        bindings=["a=b", "c@d=e"], threads=2, upstream=True, seed=7,
    )  # fmt: skip
    found = _engine_options(given)
    assert found == [
        ("--recipe", "r.py"), ("--dtype", "float32"), ("--max-running", "3"), ("--pool-bytes", "1MiB"),
        ("--no-prefix-cache", None), ("--bind", "a=b"), ("--bind", "c@d=e"), ("--threads", "2"), ("--upstream", None),
    ]  # fmt: skip
    assert _engine_options(BenchArguments(source="x")) == []


def test_a_checkpoint_is_served_for_the_run_and_nothing_stays(twin: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    options = ("--dtype", "float32", "--pool-bytes", "16MiB", "--threads", "1")
    code, found = run_json("bench", str(twin), *SMALL, *options)
    assert code == 0 and found["verdict"] == "pass", found
    assert 0 < found["start_seconds"] < found["first_token_seconds"]
    assert [level["median"]["requests"] for level in found["levels"]] == [3, 3]
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.slow
def test_an_engine_is_measured_without_http(twin: Path) -> None:
    options = ("--dtype", "float32", "--pool-bytes", "16MiB", "--threads", "1")
    code, found = run_json("bench", str(twin), *SMALL, *options, "--in-process")
    assert code == 0 and found["how"] == "in-process", found
    assert [level["median"]["requests"] for level in found["levels"]] == [3, 3]


def test_a_checkpoint_that_cannot_be_served_is_the_servers_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyKnowsForCausalLM"]}')
    code, found = run_json("bench", str(tmp_path), *SMALL)
    assert code == 1 and "NobodyKnows" in found["error"]["message"], found
