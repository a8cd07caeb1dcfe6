"""Sampling parameters and engine configs: what is taken, and the sentence for what is not."""

from __future__ import annotations

import math

import msgspec
import pytest

from dayzero.engine.check import ParamError, check
from dayzero.engine.config import EngineConfig
from dayzero.engine.request import Grammar, SamplingParams
from dayzero.errors import UsageError

VOCAB = 1000


def checked(prompt_len: int = 10, **given: object) -> SamplingParams:
    return check(SamplingParams(**given), prompt_len, 100, VOCAB)  # type: ignore[arg-type]


REFUSED = [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
    ("temperature", True), ("temperature", None), ("temperature", 10**400), ("top_p", 0.0), ("top_p", 1.01),
    ("top_p", math.nan), ("min_p", -0.01), ("min_p", 1.5), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
    ("presence_penalty", -math.inf), ("repetition_penalty", 0.0), ("repetition_penalty", math.nan), ("top_k", -2),
    ("top_k", 1.0), ("n", 0), ("n", 129), ("n", True), ("seed", 2**63), ("seed", 1.5), ("seed", 10**5000),
    ("max_tokens", -1), ("max_tokens", 1.0), ("max_tokens", 91), ("min_tokens", -1), ("min_tokens", 91),
    ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", 21), ("prompt_logprobs", True),
    ("logit_bias", {VOCAB: 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {"5": 1.0}), ("logit_bias", {5: math.nan}),
    ("logit_bias", {5: 101}), ("logit_bias", [1]), ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ("stop", ("",)), ("stop", ("x",) * 33), ("stop", ("x" * 1025,)), ("stop", "text"), ("stop", (5,)),
    ("stop_token_ids", (VOCAB,)), ("stop_token_ids", (-1,)), ("stop_token_ids", (True,)), ("stop_token_ids", 5),
    ("stop_token_ids", (1,) * 257), ("ignore_eos", 1), ("include_stop", None), ("skip_special_tokens", "no"),
    ("grammar", Grammar(kind="json_schema", text="{")), ("grammar", Grammar(kind="json_schema", text="[]")),
    ("grammar", Grammar(kind="json_schema", text="[" * 100_000)), ("grammar", Grammar(kind="choice", text="[]")),
    ("grammar", Grammar(kind="choice", text='["a", 1]')), ("grammar", Grammar(kind="regex")),
    ("grammar", Grammar(kind="poem", text="x")), ("grammar.after", Grammar(kind="json_object", after=VOCAB)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_value_that_cannot_hold_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ParamError, match=f"^{field}|^the prompt has 10 tokens and {field}") as caught:
        checked(**{field.partition(".")[0]: value})
    assert caught.value.field == field and isinstance(caught.value, UsageError)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


TAKEN = [
    {"temperature": 0}, {"temperature": 2.0}, {"top_p": 1.0, "min_p": 1.0, "top_k": 10**6}, {"n": 128},
    {"seed": -(2**63)}, {"presence_penalty": -2, "frequency_penalty": 2}, {"logit_bias": {0: -100, VOCAB - 1: 100.0}},
    {"stop": ("x",) * 32, "stop_token_ids": (0, VOCAB - 1)}, {"logprobs": 0, "prompt_logprobs": 20},
    {"max_tokens": 90, "min_tokens": 90}, {"max_tokens": 0}, {"grammar": Grammar(kind="json_object")},
    {"grammar": Grammar(kind="json_schema", text="true")}, {"grammar": Grammar(kind="choice", text='["a"]', after=7)},
]  # fmt: skip


@pytest.mark.parametrize("given", TAKEN, ids=str)
def test_a_value_at_its_limit_is_taken_as_it_is(given: dict[str, object]) -> None:
    params = checked(**given)
    for field, value in given.items():
        assert getattr(params, field) == value


def test_what_is_left_open_is_filled_in() -> None:
    assert checked().max_tokens == 90
    assert checked(prompt_len=99).max_tokens == 1
    assert checked(top_k=-1).top_k == 0  # a spelling of "off"
    assert checked(max_tokens=5) == SamplingParams(max_tokens=5)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "numbers"),
    [(101, None, ("101", "100")), (100, None, ("100", "100")), (101, 0, ("101", "100")), (100, 1, ("100", "101")),
     (60, 41, ("60", "101", "40"))],
)  # fmt: skip
def test_too_long_names_both_numbers(prompt_len: int, max_tokens: int | None, numbers: tuple[str, ...]) -> None:
    with pytest.raises(ParamError) as caught:
        checked(prompt_len=prompt_len, max_tokens=max_tokens)
    assert caught.value.field == ("max_tokens" if prompt_len <= 100 and max_tokens else "prompt")
    assert all(number in str(caught.value) for number in numbers)


def test_the_last_place_of_the_context_can_be_used() -> None:
    assert checked(prompt_len=100, max_tokens=0).max_tokens == 0
    assert checked(prompt_len=99, max_tokens=1).max_tokens == 1
    with pytest.raises(ParamError, match="empty"):
        checked(prompt_len=0)


CONFIGS = [
    ({"max_running": 0}, "max_running is 0"), ({"max_running": True}, "max_running"),
    ({"max_running": 65, "max_step_tokens": 64}, "max_step_tokens only 64"), ({"chunk_tokens": 0}, "chunk_tokens"),
    ({"page_tokens": 48}, "power of two"), ({"page_tokens": 2048}, "power of two"), ({"pool_bytes": -1}, "pool_bytes"),
    ({"snapshot_tokens": 100}, "multiple of page_tokens"), ({"snapshot_bytes": -1}, "snapshot_bytes"),
    ({"max_waiting": -1}, "max_waiting"), ({"dtype": "float8"}, "auto, float32, bfloat16"), ({"seed": 0.5}, "seed"),
    ({"debug": 1}, "true or false"), ({"bindings": {"a": "b"}}, "pairs"), ({"bindings": (("a", ""),)}, "pairs"),
    ({"bindings": (("a", "x"), ("a", "y"))}, "twice"), ({"max_model_len": 2**63}, "max_model_len"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), CONFIGS, ids=lambda v: str(v))
def test_a_config_that_cannot_hold_is_refused(given: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        EngineConfig(**given)  # type: ignore[arg-type]


def test_no_longer_context_is_promised_than_the_model_was_trained_for() -> None:
    assert EngineConfig().context(4096) == 4096
    assert EngineConfig(max_model_len=4096).context(4096) == 4096
    assert EngineConfig(max_model_len=100).context(4096) == 100
    with pytest.raises(UsageError, match="max_model_len is 4097, but the model was trained for 4096"):
        EngineConfig(max_model_len=4097).context(4096)


def test_a_config_is_frozen_and_crosses_processes_unchanged() -> None:
    config = EngineConfig(max_running=3, chunk_tokens=7, snapshot_tokens=128, bindings=(("layers.*", "reference"),))
    with pytest.raises(AttributeError):
        config.max_running = 4  # type: ignore[misc]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert ("chunk_tokens", "7") in config.rows()
