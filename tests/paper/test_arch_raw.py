"""The config ledger: every key read, ignored with a reason, or reported."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.arch.raw import Raw
from dayzero.errors import ConfigError


def test_unread_keys_are_named_by_path() -> None:
    raw = Raw({"a": 1, "b": 2, "text_config": {"c": 3, "d": 4}, "use_cache": True})
    raw.int("a")
    raw.sub("text_config").int("c")
    assert raw.unread() == ["b", "text_config.d"]
    assert raw.ledger.ignored == {"use_cache": "an engine always caches"}


def test_a_whole_object_counts_as_read_only_when_taken_whole() -> None:
    raw = Raw({"media": {"x": 1}, "other": {"y": 1}})
    raw.whole("media")
    assert raw.unread() == ["other"]


def test_defaults_are_recorded_when_the_key_is_absent_or_null() -> None:
    raw = Raw({"present": 5, "nothing": None})
    assert raw.int("present", default=7) == 5
    assert raw.int("absent", default=7) == 7
    assert raw.int("nothing", default=9) == 9
    assert raw.int_or_none("nothing") is None  # here null is a statement, nothing is assumed
    assert raw.ledger.defaulted == {"absent": 7, "nothing": 9}
    assert raw.unread() == []


def test_null_never_turns_into_true() -> None:
    """transformers reads null as false: a class default of true would compute the opposite of the file."""
    raw = Raw({"norm_topk_prob": None, "attention_bias": None})
    assert raw.bool("attention_bias", default=False) is False
    with pytest.raises(ConfigError, match="norm_topk_prob is null"):
        raw.bool("norm_topk_prob", default=True)


def test_library_options_are_forgiven_at_their_neutral_value_only() -> None:
    """A pruned head or an encoder is no bookkeeping."""
    raw = Raw({"is_encoder_decoder": False, "pruned_heads": {}, "cross_attention_hidden_size": None})
    assert raw.unread() == []
    odd = {"is_encoder_decoder": True, "pruned_heads": {"0": [1]}, "cross_attention_hidden_size": 64}
    assert Raw(odd).unread() == list(odd)


def test_two_spellings_must_agree() -> None:
    assert Raw({"dtype": "bfloat16", "torch_dtype": "bfloat16"}).str("dtype", "torch_dtype") == "bfloat16"
    with pytest.raises(ConfigError, match=r"dtype = 'float16'.*torch_dtype = 'bfloat16'"):
        Raw({"dtype": "float16", "torch_dtype": "bfloat16"}).str("dtype", "torch_dtype")


@pytest.mark.parametrize(
    ("value", "read"),
    [(True, "int"), ("4", "int"), (-1, "int"), (4.5, "int"), ("x", "float"), (1, "bool"), (3, "str"), ("ab", "list")],
)
def test_wrong_types_are_one_sentence_naming_the_key(value: object, read: str) -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        getattr(Raw({"hidden_size": value}), read)("hidden_size")


def test_whole_floats_are_whole_numbers() -> None:
    assert Raw({"n": 3.0}).int("n") == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_must_be_finite(bad: float) -> None:
    with pytest.raises(ConfigError, match="finite"):
        Raw({"eps": bad}).float("eps")


def test_one_of_refuses_what_the_recipe_does_not_know() -> None:
    assert Raw({"act": "silu"}).one_of("act", allowed=("silu", "gelu")) == "silu"
    with pytest.raises(ConfigError, match=r"act is 'tanh'.*'silu'"):
        Raw({"act": "tanh"}).one_of("act", allowed=("silu",))
    with pytest.raises(ConfigError):  # 0 == False in Python, but not in a config
        Raw({"flag": 0}).one_of("flag", allowed=(False,))


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=3) | st.none(), max_size=6))
def test_reading_everything_leaves_nothing(data: dict[str, object]) -> None:
    raw = Raw(data)
    for key in data:
        raw.whole(key)
    assert raw.unread() == []
