"""Bad input: one sentence and the right exit code, whatever config.json holds; never an exception of another kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayzero.errors import CheckpointError, ConfigError, UsageError, UserError
from dayzero.planner.inspect import inspect_source
from tests.paper.inspect_checkpoints import config_of, table_of, write_folder
from tests.paper.test_inspect_findings import fails, small_dense, small_moe

BAD_TEXTS = {
    "empty": "", "no JSON": "{'a': 1}", "cut": '{"hidden_size": 5', "a list": "[1, 2]", "a number": "7", "null": "null",
    "NaN": '{"rms_norm_eps": NaN}', "infinity": '{"rope_theta": Infinity}', "overflow": '{"rope_theta": 1e999}',
    "deep list": "[" * 100_000, "deep object": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "deep but readable": '{"a":' * 200 + "1" + "}" * 200, "digits": '{"hidden_size": ' + "9" * 6000 + "}",
    "huge": '{"hidden_size": 36893488147419103232}', "layers": '{"num_hidden_layers": 1000000000}',
    "layers as float": '{"num_hidden_layers": 1e12}', "huge as float": '{"head_dim": 1e300}',
    "surrogate": '{"a": "\\ud800", "hidden_size": 1' ,
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_TEXTS)
def test_a_config_that_is_none_is_one_sentence(what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(BAD_TEXTS[what])
    with pytest.raises(ConfigError) as caught:
        inspect_source(str(tmp_path))
    assert caught.value.exit_code == 1
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff\xfe"}')
    with pytest.raises(CheckpointError, match="UTF-8"):
        inspect_source(str(tmp_path))


def test_places_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for where in (str(tmp_path), str(tmp_path / "nothing"), str(tmp_path / "notes.txt"), "ftp://host/model"):
        with pytest.raises(UsageError) as caught:
            inspect_source(where)
        assert caught.value.exit_code == 2
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match="pickle"):
        inspect_source(str(tmp_path))


def test_weights_without_a_config(tmp_path: Path) -> None:
    write_folder(tmp_path, small_dense(), table_of(small_dense()))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        inspect_source(str(tmp_path))


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    text = json.dumps(small_dense())
    (tmp_path / "config.json").write_text(text[:-1] + ', "rms_norm_eps": 1e-6}')
    assert "rms_norm_eps" in fails(inspect_source(str(tmp_path)))["config.repeated"].evidence


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "64"), ("hidden_size", None), ("num_attention_heads", 0), ("num_hidden_layers", -1),
     ("rms_norm_eps", "1e-5"), ("rope_theta", [1]), ("rope_scaling", "yarn"), ("tie_word_embeddings", "yes"),
     ("vocab_size", 1.5), ("hidden_act", "gelu"), ("num_key_value_heads", True), ("num_hidden_layers", 0),
     ("rope_scaling", {"rope_type": "llama3", "factor": 2.0})],
)  # fmt: skip
def test_a_wrong_type_is_a_finding_that_names_file_and_key(key: str, value: Any, tmp_path: Path) -> None:
    config = small_dense()
    config[key] = value
    if value is None:
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = inspect_source(str(tmp_path))
    assert report.verdict == "fail"
    text = " ".join(f.claim for f in report.findings if f.verdict == "fail")
    assert "config.json" in text or report.family is None
    assert key in text or "low_freq_factor" in text


@pytest.mark.parametrize(
    "changes",
    [{"n_routed_experts": 2**40}, {"head_dim": 2**41}, {"num_attention_heads": 2**50}, {"qk_rope_head_dim": 2**45}],
)
def test_sizes_no_model_has_end_quickly(changes: dict[str, Any], tmp_path: Path) -> None:
    for number, config in enumerate((small_moe(**changes), small_dense(**changes))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        assert inspect_source(str(folder)).verdict in ("fail", "note")


KEYS = sorted(
    {key for name in ("smollm2_135m", "deepseek_v32", "gpt_oss_20b", "qwen3_5_35b_a3b") for key in config_of(name)}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 64) | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    name=st.sampled_from(["smollm2_135m", "deepseek_v32", "gpt_oss_20b", "qwen3_5_35b_a3b", "kimi_k3", "glm_5_2"]),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4),
    inner=st.booleans(),
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_values_give_a_report_or_one_sentence(
    name: str, changes: dict[str, Any], inner: bool, tmp_path: Path
) -> None:
    config = config_of(name, num_hidden_layers=4) if "text_config" not in config_of(name) else config_of(name)
    (config["text_config"] if inner and "text_config" in config else config).update(changes)
    check_any(json.dumps(config), tmp_path)


@given(text=st.dictionaries(st.sampled_from([*KEYS, "text_config", "quantization_config"]), VALUES).map(json.dumps))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_object_gives_a_report_or_one_sentence(text: str, tmp_path: Path) -> None:
    check_any(text, tmp_path)


@given(text=st.text() | st.binary().map(lambda b: b.decode("latin-1")))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_gives_a_report_or_one_sentence(text: str, tmp_path: Path) -> None:
    check_any(text, tmp_path)


def check_any(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, "utf-8", errors="surrogatepass")
    try:
        report = inspect_source(str(tmp_path / "config.json"))
    except UserError as error:
        assert "\n" not in str(error).strip()  # noqa: PT017
    else:
        assert report.to_json()["verdict"] in ("note", "fail")


@pytest.mark.parametrize("stop", [-3, "<end>", [2, None], [True], {"id": 2}, 1.5])
def test_a_stop_id_that_is_none_is_told(stop: Any, tmp_path: Path) -> None:
    """It was dropped in silence, and the model would not have stopped."""
    config = small_dense()
    write_folder(tmp_path, config, table_of(config), extra={"generation_config.json": {"eos_token_id": stop}})
    assert "generation_config.json" in fails(inspect_source(str(tmp_path)))["stop_ids.no_id"].evidence[0]
