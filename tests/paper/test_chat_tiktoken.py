"""The vocabulary form tiktoken.model: splitting and merging against plain ones, cuts, bytes, damaged files, masks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from dayzero.chat import tiktoken_form
from dayzero.chat.detokenize import Detokenizer
from dayzero.chat.stand_ins import REAL_RANKS, XTML_TOKENS, made_up_ranks, stand_in_files
from dayzero.chat.tiktoken_form import MAX_CHARACTERS, MAX_RUN, SPLIT, TiktokenTokenizer, pieces
from dayzero.chat.tokenizer import open_tokenizer
from dayzero.checkpoint.source import open_source
from dayzero.engine.build import tokenizer_json
from dayzero.engine.grammar import check_grammar, read_tokenizer
from dayzero.engine.request import Grammar
from dayzero.errors import CheckpointError, UsageError
from dayzero.planner.tokenizer_files import read_tokenizer_files
from dayzero.rehearse.stand_in import main
from tests.paper.xtml_support import real_size, tokens, vocabulary, write_files

WORDS = (
    "Hello HELLO hELLO, it's I'LL 北京is naïve 12345 x1y22  \n\n  \tend  ", "русский Ελληνικά ǅabc 🦊🦊! a.b_c\r\n\r\n",
    "中文English中文 1,234.5 don't DON'T 'tis «quoted» (x)  ", "   ", "\n", "a",
    "한국어 ひらがなカタカナ漢字 ाहिन्दी", "",
)  # fmt: skip
LETTERS = st.text(st.sampled_from("aAbB'sStT .,!?\n\r\t 019é北京漢кК🦊ǅ_-<|>"), max_size=60)


def merged(word: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Byte pair merging as it is defined: again and again the pair whose joint token has the lowest rank, the first of
    equals."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        joint = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        if not joint or min(joint) == len(ranks):
            return [ranks[part] for part in parts]
        at = joint.index(min(joint))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def plainly(text: str) -> list[int]:
    """Ids by another regex library and the definition of merging."""
    words = regex.findall(SPLIT, text, flags=regex.V1)
    assert "".join(words) == text
    ranks = vocabulary(REAL_RANKS).ranks
    return [i for word in words for i in merged(word.encode(), ranks)]


@pytest.mark.parametrize("text", WORDS)
def test_text_comes_to_the_ids_of_a_plain_encoder(text: str) -> None:
    assert real_size().encode(text) == plainly(text)


@given(LETTERS)
def test_any_text_comes_to_the_ids_of_a_plain_encoder(text: str) -> None:
    assert real_size().encode(text) == plainly(text)


@given(st.text(max_size=200))
def test_any_text_comes_back(text: str) -> None:
    for one in (tokens(), real_size()):
        ids = one.encode(text)
        assert one.decode(ids, skip_special=False) == text
        assert not set(ids) & one.control_ids


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("北京is", ["北京", "is"]),
        ("HelloWorld", ["Hello", "World"]),
        ("it's DON'T", ["it's", " DON'T"]),
        ("12345", ["123", "45"]),
        ("a  b\n\n c", ["a", " ", " b", "\n\n", " c"]),
        ("x !?\n\ny", ["x", " !?\n\n", "y"]),
    ],
)
def test_how_texts_are_split(text: str, words: list[str]) -> None:
    """Whatever the merges are: a word is encoded as it is alone."""
    assert real_size().encode(text) == [i for word in words for i in real_size().encode(word)]


def test_the_real_ids_of_the_added_tokens() -> None:
    one = real_size()
    published = {
        "[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588,
        "<|sep|>": 163589, "<|media_begin|>": 163602, "<|media_content|>": 163603, "<|media_end|>": 163604,
        "<|media_pad|>": 163605, "[UNK]": 163838, "[PAD]": 163839, "<|reserved_token_163600|>": 163600,
    }  # fmt: skip
    assert {text: one.id_of(text) for text in published} == published
    assert one.vocab_size == 163840 and len(one.added) == 256
    assert {text for text, _ in XTML_TOKENS.values()} < set(one.added)
    assert (
        one.id_of("<|open|>") not in one.special_ids
    )  # not marked special, as published; a control token all the same
    assert one.control_ids == set(range(163584, 163840))


def test_control_tokens_are_letters_unless_asked_for() -> None:
    one = real_size()
    text = "a<|open|>b[EOS]<|reserved_token_163700|>"
    assert one.encode(text, special=True) == [*one.encode("a"), 163587, *one.encode("b"), 163585, 163700]
    plain = one.encode(text)
    assert max(plain) < 163584
    assert one.decode(plain) == text
    assert one.encode_parts([("<|open|>", True), ("us", False), ("er<|sep|>", False)]) == [
        163587, *one.encode("us"), *one.encode("er<|sep|>")]  # fmt: skip


def test_skipped_are_the_special_ones_alone() -> None:
    one = tokens()
    ids = one.encode("[BOS]a<|open|>b<|media_pad|>", special=True)
    assert one.decode(ids) == "a<|open|>b"
    assert one.token_bytes(600) == one.token_bytes(-1) == b""


@given(st.text("a北🦊é", max_size=30), st.lists(st.integers(1, 5), min_size=1))
def test_half_characters_wait_for_their_other_half(text: str, cuts: list[int]) -> None:
    """A token of the small vocabulary is a byte."""
    ids = tokens().encode(text)
    assert len(ids) == len(text.encode())
    reader, out, at, number = Detokenizer(tokens()), "", 0, 0
    while at < len(ids):
        out += reader.push(ids[at : at + cuts[number % len(cuts)]]).text
        at, number = at + cuts[number % len(cuts)], number + 1
    assert out + reader.flush().text == text


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(UsageError, match="surrogate"):
        tokens().encode("a\ud800b")


# --- very long texts ----------------------------------------------------------------------------------------------


def plain_pieces(text: str, most: int, run: int) -> list[str]:
    """The cuts letter by letter."""
    out = []
    for start in range(0, len(text), most):
        part = text[start : start + most]
        begins, length = 0, 0
        for i, letter in enumerate(part):
            length = length + 1 if i and part[i - 1].isspace() == letter.isspace() else 1
            if length > run:
                out.append(part[begins:i])
                begins, length = i, 1
        out.append(part[begins:])
    return out


@given(st.text("ab \n\x1c\u2003é", max_size=60), st.integers(1, 25), st.integers(1, 7))
def test_cuts_are_where_the_rule_puts_them(text: str, most: int, run: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken_form, "MAX_CHARACTERS", most)
        patch.setattr(tiktoken_form, "MAX_RUN", run)
        assert list(pieces(text)) == plain_pieces(text, most, run)


@pytest.mark.parametrize("letter", ["a", " ", "北", "🦊", "!", "1", "\n"])
def test_long_runs_are_cut_and_come_back(letter: str) -> None:
    assert (MAX_CHARACTERS, MAX_RUN) == (400_000, 25_000)  # as the publisher's code has them
    text = "x" + letter * (2 * MAX_RUN + 17)
    parts = list(pieces(text))
    assert max(map(len, parts)) <= MAX_RUN + 1 and len(parts) == 3
    ids = real_size().encode(text)
    assert real_size().decode(ids) == text
    assert ids == [i for part in parts for i in real_size().encode(part)]


def test_a_text_beyond_the_limit_is_cut_at_it() -> None:
    text = "word and " * (MAX_CHARACTERS // 9 + 40)
    first, second = text[:MAX_CHARACTERS], text[MAX_CHARACTERS:]
    assert list(pieces(text)) == [first, second]
    assert real_size().encode(text) == real_size().encode(first) + real_size().encode(second)


# --- files --------------------------------------------------------------------------------------------------------


def test_a_folder_is_opened_and_says_what_it_holds(tmp_path: Path) -> None:
    source = open_source(str(write_files(tmp_path)))
    found, where = open_tokenizer(source)
    assert isinstance(found, TiktokenTokenizer) and where == "tiktoken.model"
    files = read_tokenizer_files(source, {"eos_token_id": 258})
    assert (files.tokenizer["kind"], files.tokenizer["size"], files.largest_id) == ("tiktoken", 512, 511)
    assert files.stop[257] == ["tokenizer_config.json eos_token"]


def test_an_unknown_way_to_split_is_not_guessed(tmp_path: Path) -> None:
    (write_files(tmp_path) / "tokenizer_config.json").write_text('{"tokenizer_class": "Other"}')
    found, why = open_tokenizer(open_source(str(tmp_path)))
    assert found is None and "tiktoken.model, a form that is not read" in why
    assert tokenizer_json(str(tmp_path)) is None


def test_bos_where_the_files_ask_for_it(tmp_path: Path) -> None:
    config = json.loads((write_files(tmp_path) / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    found, _ = open_tokenizer(open_source(str(tmp_path)))
    assert found is not None
    assert found.encode("a", begin=True) == [256, 97]
    assert tokens().encode("a", begin=True) == [97]


def edit_ranks(folder: Path, edit: Any) -> None:
    lines = (folder / "tiktoken.model").read_text().splitlines()
    (folder / "tiktoken.model").write_text("\n".join(edit(lines)) + "\n")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda lines: [*lines[:9], "?? 9", *lines[10:]], "line 10 is no base64"),
        (lambda lines: [*lines[:9], "YQ==", *lines[10:]], "line 10 is no base64"),
        (lambda lines: lines[:200], "no token for the byte 200"),
        (lambda lines: [*lines, "YWI= 300"], "ranks are not 0 to 256"),
        (lambda lines: [], "no token for the byte 0"),
    ],
)
def test_damaged_ranks_are_one_sentence(edit: Any, said: str, tmp_path: Path) -> None:
    edit_ranks(write_files(tmp_path), edit)
    with pytest.raises(CheckpointError, match=said):
        open_tokenizer(open_source(str(tmp_path)))
    files = read_tokenizer_files(open_source(str(tmp_path)), {})
    assert files.findings[0].kind == "tokenizer.file"


@pytest.mark.parametrize(
    ("listed", "said"),
    [({"3": {"content": "x"}}, "added tokens of tiktoken.model are 256 to 511"),
     ({"256": {"content": "x"}, "257": {"content": "x"}}, "one text to two tokens"), ({"300": {}}, "lists 'None'")],
)  # fmt: skip
def test_names_that_cannot_be(listed: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = json.loads((write_files(tmp_path) / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": listed}))
    with pytest.raises(CheckpointError, match=said):
        open_tokenizer(open_source(str(tmp_path)))


def test_the_program_writes_the_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "new"), "--ranks", "300"])
    found, _ = open_tokenizer(open_source(str(write_config(tmp_path / "new"))))
    assert found is not None and found.id_of("<|open|>") == 303
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path), "--ranks", "7"])
    assert caught.value.code == 2 and "every byte needs one" in capsys.readouterr().err


def write_config(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    return folder


def test_where_the_added_tokens_of_a_twin_stand() -> None:
    for vocab, stops, first in [(512, (258,), 256), (600, (), 344), (1024, (258,), 256), (163840, (163586,), 163584)]:
        config = json.loads(stand_in_files("kimi_k3", vocab, stops)["tokenizer_config.json"])
        assert config["added_tokens_decoder"][str(first + 3)]["content"] == "<|open|>"
    assert stand_in_files("kimi_k3", 511, ()) == stand_in_files("qwen3", 4096, ()) == {}
    assert len(made_up_ranks(70_000)) == 70_000


# --- structured output --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 512, 600])
def test_the_grammar_library_reads_the_same_vocabulary(rows: int, tmp_path: Path) -> None:
    found = tokenizer_json(str(write_files(tmp_path)))
    masks = read_tokenizer(found, rows)  # type: ignore[arg-type]
    assert masks.vocab_size == max(rows, 512)
    assert masks.tokenize_str("a北") == tokens().encode("a北")
    matcher = LLMatcher(masks, LLMatcher.grammar_from_lark('start: <[259]> "think" <[261]> /[a-z]+/ <[260]>'))
    ids = tokens().encode("<|open|>think<|sep|>hm<|close|>", special=True)
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    letters = tokens().encode("<|open|>")
    assert LLMatcher(masks, LLMatcher.grammar_from_regex("(?s:.*)")).try_consume_tokens([259]) == 0  # not as a text
    assert LLMatcher(masks, LLMatcher.grammar_from_regex("(?s:.*)")).try_consume_tokens(letters) == len(letters)
    assert check_grammar(Grammar(kind="regex", text="a+"), found) is None
    assert "cannot be used" in (check_grammar(Grammar(kind="regex", text="("), found) or "")
