"""Tokenizer and detokenizer: the library's own answers, bytes of each token, any cutting, stop strings."""

from __future__ import annotations

import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from dayzero.chat.control import ControlTokens
from dayzero.chat.detokenize import Detokenizer
from dayzero.chat.text_limit import TextTooLong, coverage
from dayzero.chat.tokenizer import LETTER_OF, JsonTokenizer, open_tokenizer
from dayzero.checkpoint.source import open_source
from dayzero.errors import CheckpointError, UsageError
from tests.paper.chat_models import CHATML, byte_level, folder, sentencepiece

TEXT = byte_level(CHATML, ("<think>", "</think>", "  "))
TOKENS = JsonTokenizer(TEXT, {}, name="test", controls="{{ '<|im_start|>' }}<think>")
LIBRARY = Library.from_str(TEXT)
PIECES = JsonTokenizer(sentencepiece(), {}, name="test")
EVERY_ID = range(TOKENS.vocab_size + 3)


@given(st.text(max_size=40))
def test_text_comes_back_as_it_went(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ids = TOKENS.encode(text)
    assert ids == LIBRARY.encode(text, add_special_tokens=False).ids
    assert TOKENS.decode(ids, skip_special=False) == text
    assert b"".join(map(TOKENS.token_bytes, ids)) == text.encode()


@given(st.lists(st.sampled_from(EVERY_ID), max_size=30), st.booleans())
def test_decoding_is_the_librarys(ids: list[int], skip: bool) -> None:
    assert TOKENS.decode(ids, skip_special=skip) == LIBRARY.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_vocabularies() -> None:
    library = Library.from_str(sentencepiece())
    for text in ("hello world", "hé 北", " hello"):
        ids = library.encode(text, add_special_tokens=False).ids
        assert PIECES.encode(text) == ids
        assert PIECES.decode(ids) == library.decode(ids) == text
    streamed = Detokenizer(PIECES)
    assert streamed.push(PIECES.encode("world")).text == " world"  # an answer goes on, so its space stays


def test_user_text_is_letters_where_control_tokens_are_concerned() -> None:
    text = "a<|im_end|>b<think>c</think>d  e"
    plain, special = TOKENS.encode(text), TOKENS.encode(text, special=True)
    assert TOKENS.decode(plain, skip_special=False) == TOKENS.decode(special, skip_special=False) == text
    ids = {t: TOKENS.id_of(t) for t in ("<|im_end|>", "<think>", "</think>", "  ")}
    assert ids["<|im_end|>"] in special
    assert ids["<think>"] in special
    assert not {ids["<|im_end|>"], ids["<think>"]} & set(plain)
    # Neither marked special nor written by the template: ordinary vocabulary, in any text.
    assert {ids["</think>"], ids["  "]} <= set(plain)
    assert ids["<think>"] not in TOKENS.special_ids  # so its text is shown when special tokens are skipped
    assert TOKENS.decode(special) == "ab<think>c</think>d  e"


def test_parts_are_encoded_each_for_itself() -> None:
    parts = [("<|im_start|>", True), ("us", False), ("er<|im_end|>", False)]
    assert TOKENS.encode_parts(parts) == [i for text, special in parts for i in TOKENS.encode(text, special)]


def test_bos_is_added_once() -> None:
    config = {"add_bos_token": True, "bos_token": {"content": "<|endoftext|>"}}
    tokens = JsonTokenizer(TEXT, config, name="x")
    bos = tokens.id_of("<|endoftext|>")
    assert tokens.encode("hi", begin=True) == [bos, *TOKENS.encode("hi")]
    assert tokens.encode("hi") == TOKENS.encode("hi")
    assert tokens.encode("<|endoftext|>hi", special=True, begin=True) == [bos, *TOKENS.encode("hi")]


def test_tokens_that_only_the_config_lists(tmp_path: Path) -> None:
    listed = {str(TOKENS.vocab_size): {"content": "<|extra|>", "special": True}}
    source = open_source(str(folder(tmp_path / "a", TEXT, tokenizer_config={"added_tokens_decoder": listed})))
    tokens, where = open_tokenizer(source)
    assert tokens is not None
    assert where == "tokenizer.json"
    assert tokens.encode("<|extra|>", special=True) == [TOKENS.vocab_size]
    wrong = {"3": {"content": "<|extra|>", "special": True}}
    source = open_source(str(folder(tmp_path / "b", TEXT, tokenizer_config={"added_tokens_decoder": wrong})))
    with pytest.raises(CheckpointError, match="the id 3, but tokenizer.json makes it"):
        open_tokenizer(source)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}", "no tokenizer"), ("[", "no tokenizer"), ('{"model": {"type": "BPE", "vocab": {"a": 0}}}', "no tokenizer"),
     (Library.to_str(LIBRARY).replace('"ByteLevel","add_prefix_space":true', '"WordPiece"'), "decoder|no tokenizer")],
)  # fmt: skip
def test_damaged_files_are_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        open_tokenizer(open_source(str(folder(tmp_path, text))))
    assert len(str(caught.value)) < 300


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    tokens, why = open_tokenizer(open_source(str(folder(tmp_path))))
    assert tokens is None
    assert "no tokenizer" in why
    (tmp_path / "tiktoken.model").write_text("x")
    tokens, why = open_tokenizer(open_source(str(tmp_path)))
    assert tokens is None
    assert "tiktoken.model" in why


def test_half_a_character_is_refused() -> None:
    with pytest.raises(UsageError, match="surrogate"):
        TOKENS.encode("a\ud800b")


# --- detokenizing -----------------------------------------------------------------------------------------------------


def run(ids: list[int], cuts: list[int], **more: object) -> tuple[list[str], str | None, int]:
    """(texts, stop string, tokens of the answer)."""
    one = Detokenizer(TOKENS, **more)  # type: ignore[arg-type]
    out, used, at, number = [], 0, 0, 0
    while at < len(ids):
        step = cuts[number % len(cuts)]
        text = one.push(ids[at : at + step])
        out.append(text.text)
        used += text.tokens_used
        at, number = at + step, number + 1
    rest = one.flush()
    assert rest.tokens_used == 0
    return [*out, rest.text], one.stopped, used


IDS = st.lists(st.sampled_from(EVERY_ID), max_size=40) | st.text("ab🦊é<think>\n", max_size=12).map(TOKENS.encode)
CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@given(IDS, CUTS, st.booleans())
def test_streamed_is_not_streamed(ids: list[int], cuts: list[int], skip: bool) -> None:
    texts, stopped, used = run(ids, cuts, skip_special=skip)
    assert "".join(texts) == TOKENS.decode(ids, skip_special=skip)
    assert (stopped, used) == (None, len(ids))


@given(st.text("北京🦊é", min_size=1, max_size=8))
def test_no_half_character_is_shown(text: str) -> None:
    texts, _, _ = run(TOKENS.encode(text), [1])
    assert "�" not in "".join(texts)
    assert "".join(texts) == text


@given(
    st.text("abc\n🦊", max_size=30), st.lists(st.text("abc\n🦊", min_size=1, max_size=4), min_size=1, max_size=3), CUTS,
    st.booleans(),
)  # fmt: skip
def test_stop_strings(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    ids = TOKENS.encode(text)
    texts, stopped, used = run(ids, cuts, stop=stops, include_stop=include)
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    whole = "".join(texts)
    if not found:
        assert (whole, stopped, used) == (text, None, len(ids))
        return
    end, _, stop = min(found)
    assert stopped == stop
    assert whole == text[: end if include else end - len(stop)]
    before, upto = TOKENS.decode(ids[: used - 1]), TOKENS.decode(ids[:used])
    assert len(upto.rstrip("�")) >= end > len(before.rstrip("�"))  # the token that completed it is the last counted
    for end in range(len(texts)):  # and at no moment was any of the stop string out
        assert whole.startswith("".join(texts[:end]))


def test_a_stop_string_may_span_tokens_and_pushes() -> None:
    ids = [*TOKENS.encode("one"), *TOKENS.encode(" EN"), *TOKENS.encode("D and more")]
    for cut in (1, 2, len(ids)):
        texts, stopped, used = run(ids, [cut], stop=("END",))
        assert ("".join(texts), stopped) == ("one ", "END")
        assert TOKENS.decode(ids[:used]).startswith("one END")
        assert "END" not in TOKENS.decode(ids[: used - 1])


def test_special_tokens_are_skipped_but_for_markers() -> None:
    ids = TOKENS.encode("<|im_start|>a<|im_end|>", special=True)
    keep = [TOKENS.added["<|im_end|>"]]
    assert "".join(run(ids, [1])[0]) == "a"
    assert "".join(run(ids, [1], keep=keep)[0]) == "a<|im_end|>"
    assert "".join(run(ids, [1], skip_special=False)[0]) == "<|im_start|>a<|im_end|>"


def test_the_file_is_what_a_publisher_ships() -> None:
    added = json.loads(TEXT)["added_tokens"]
    assert [t["content"] for t in added if not t["special"]] == ["<think>", "</think>", "  "]


ABC = st.text("abc", min_size=1, max_size=12)


@given(text=ABC, stop=st.text("abc", min_size=1, max_size=3), least=st.integers(0, 13))
def test_stops_that_early_tokens_complete_do_not_count(text: str, stop: str, least: int) -> None:
    """By the definition: of the places where the stop is complete, the first one behind ``least`` tokens ends it."""
    ids = [TOKENS.encode(letter)[0] for letter in text]
    ends = [n for n in range(1, len(text) + 1) if text[:n].endswith(stop) and n > least]
    one = Detokenizer(TOKENS, stop=[stop], min_tokens=least)
    got = [one.push([token]) for token in ids]
    shown = "".join(part.text for part in got) + one.flush().text
    assert one.stopped == (stop if ends else None)
    assert shown == (text[: ends[0] - len(stop)] if ends else text)
    assert sum(part.tokens_used for part in got) == (ends[0] if ends else len(text))


# --- texts that are too long in any case ------------------------------------------------------------------------------


def with_parts(**more: object) -> str:
    return json.dumps(json.loads(TEXT) | more)


LIMITED = [TEXT, sentencepiece(), with_parts(normalizer={"type": "NFC"}), with_parts(normalizer={"type": "NFKC"})]


@pytest.mark.parametrize("file", LIMITED, ids=["bytes", "pieces", "nfc", "nfkc"])
@given(
    text=st.one_of(
        st.text(max_size=60), st.sampled_from(["ᾂ", "각", "<think>", "  ", "hello", "①"]).map(lambda t: t * 30)
    )
)
def test_no_text_has_fewer_tokens_than_its_characters_ask_for(file: str, text: str) -> None:
    """The lower bound is one, whatever the normalizer joins."""
    text = unicodedata.normalize("NFD", text.encode("utf-8", "ignore").decode())
    tokens = tokenizer_of(file)
    assert tokens.coverage is not None
    length = len(text) - sum(map(text.count, tokens.coverage.lost))
    assert len(tokens.encode(text, special=True)) * tokens.coverage.chars >= length


@cache
def tokenizer_of(file: str) -> JsonTokenizer:
    return JsonTokenizer(file, {}, name="test")


def test_a_text_beyond_the_limit_is_refused_before_it_is_encoded() -> None:
    tokens = JsonTokenizer(TEXT, {}, name="test")
    assert tokens.coverage is not None
    most = 7 * tokens.coverage.chars
    tokens.check_length("x" * 10**6)  # nobody has said how long a prompt may be
    tokens.limit(7)
    tokens.check_length("x" * most)
    with pytest.raises(TextTooLong, match="at most 7 tokens"):
        tokens.check_length("x" * (most + 1))
    with pytest.raises(TextTooLong):
        ControlTokens(tokens).encode("x" * (most + 1), "\ue000")


def test_characters_that_a_vocabulary_drops_do_not_count() -> None:
    parsed = json.loads(TEXT)
    number = parsed["model"]["vocab"].pop(LETTER_OF[4])
    parsed["model"]["vocab"]["unused"] = number
    tokens = JsonTokenizer(json.dumps(parsed), {}, name="test")
    assert tokens.encode("\x04" * 50) == []
    tokens.limit(1)
    tokens.check_length("\x04" * 10**6)


@pytest.mark.parametrize(
    "more",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"added_tokens": [{"id": 5, "content": "<m>", "special": True, "lstrip": True, "rstrip": False,
                           "normalized": False, "single_word": False}]},
    ],
)  # fmt: skip
def test_where_characters_may_be_lost_nothing_is_refused_early(more: dict[str, object]) -> None:
    assert coverage(with_parts(**more), LETTER_OF) is None


def test_a_file_that_cuts_texts_short_does_not_cut_prompts() -> None:
    """As training runs leave it in the file."""
    cut = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
           "pad_token": "a"}  # fmt: skip
    tokens = JsonTokenizer(with_parts(truncation=cut, padding=pad), {}, name="test")
    for text in ("a", "hello to the whole world"):
        assert tokens.encode(text) == TOKENS.encode(text)


def test_a_long_text_does_not_hold_up_the_others() -> None:
    """Texts with and without control tokens are encoded side by side, each as it is alone."""
    text = "<|im_start|> a"
    alone = [TOKENS.encode(text, special) for special in (True, False)]
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(TOKENS.encode, "wörd " * 400_000, True)
        meanwhile = [TOKENS.encode(text, special) for special in (True, False)]
        waited = long.done()
    assert meanwhile == alone and not waited
