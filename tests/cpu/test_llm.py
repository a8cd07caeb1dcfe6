"""The offline API: answers as the engine gives them, streamed = not, stop texts, n, errors in one sentence."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dayzero import LLM, SamplingParams
from dayzero.chat.conversation import Tool
from dayzero.engine.answer import Answer, Delta
from dayzero.engine.client import AsyncEngine
from dayzero.engine.config import EngineConfig
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.request import Grammar, NewRequest
from dayzero.engine.step import StepResult
from dayzero.errors import EngineDead, ModelError, UsageError
from dayzero.rehearse.twin import write_twin
from tests.paper.fake_engine import DEFAULT, VOCAB, FakeExecutor, Habits, answer, fake_launch
from tests.paper.small_tokenizer import THOUGHT, small_tokenizer, small_tokenizer_json

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"


def fake_llm(folder: Path, habits: Habits = DEFAULT, text: bool = True, **options: Any) -> LLM:
    fake_launch(folder, habits)
    if text:
        (folder / "tokenizer.json").write_text(small_tokenizer_json())
    return LLM(str(folder), make=FakeExecutor, debug=True, **options)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with fake_llm(tmp_path_factory.mktemp("llm") / "m") as one:
        yield one


def joined(deltas: list[Delta]) -> tuple[list[int], str, list[object]]:
    assert [d.finish_reason is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
    tokens = [t for d in deltas for t in d.token_ids]
    return tokens, "".join(d.text for d in deltas), [deltas[-1].finish_reason, deltas[-1].stop_reason]


def test_ids_and_texts_give_the_answers_of_the_model(llm: LLM) -> None:
    ids = [[n + 9] * (n * 5 + 1) for n in range(12)]
    params = [SamplingParams(max_tokens=n + 1, ignore_eos=False) for n in range(12)]
    found = llm.generate(ids, params)
    assert [(one.token_ids, one.finish_reason) for one in found] == [answer(p, n + 1) for n, p in enumerate(ids)]
    assert [one.prompt_token_ids for one in found] == ids
    assert all(one.text == small_tokenizer().decode(one.token_ids) for one in found)
    (by_text,) = llm.generate("the ab", params[5])
    assert by_text.prompt == "the ab" and by_text.prompt_token_ids == small_tokenizer().encode("the ab").ids
    assert by_text.token_ids == answer(by_text.prompt_token_ids, 6)[0]
    assert llm.generate(ids[3], params[5])[0].token_ids == answer(ids[3], 6)[0]
    assert llm.generate([]) == []


def test_streamed_is_not_streamed_also_with_stop_texts(llm: LLM) -> None:
    prompts = [[start, start + 1] for start in range(10, 130)]
    plain = SamplingParams(max_tokens=60, logprobs=1)
    stopped = 0
    for prompt, free in zip(prompts, llm.generate(prompts, plain)):
        whole = (free.token_ids, free.text, [free.finish_reason, free.stop_reason])
        assert joined(list(llm.stream(prompt, plain))) == whole
        assert free.logprobs is not None and [item.token for item in free.logprobs] == free.token_ids
        stop, keep = free.text[5:8], bool(prompt[0] % 2)
        if len(stop) < 3 or "\ufffd" in stop:
            continue
        cut = SamplingParams(max_tokens=60, stop=(stop,), include_stop=keep, logprobs=0)
        (one,) = llm.generate(prompt, cut)
        assert one.text == free.text[: free.text.index(stop) + len(stop) * keep]
        assert (one.finish_reason, one.stop_reason) == ("stop", stop)
        assert one.token_ids == free.token_ids[: len(one.token_ids)]
        assert [item.token for item in one.logprobs or ()] == one.token_ids
        assert joined(list(llm.stream(prompt, cut))) == (one.token_ids, one.text, ["stop", stop])
        stopped += 1
    assert stopped > 5
    assert llm.progress().running == llm.progress().waiting == 0


def test_n_gives_that_many_and_shares_the_prompt(llm: LLM) -> None:
    found = llm.generate([[7] * 200, [8]], SamplingParams(n=3, max_tokens=2, seed=2**63 - 1))
    assert [(one.prompt_token_ids[0], one.index) for one in found] == [(p, i) for p in (7, 8) for i in range(3)]
    assert [one.cached_tokens for one in found[:3]] == [0, 192, 192]


def test_streams_can_be_left_and_interleaved(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    a, b, unread = llm.stream([5], params), llm.stream([6], params), llm.stream([7], params)
    found: dict[int, list[Delta]] = {0: [], 1: []}
    for pair in zip(a, b):
        for which, delta in enumerate(pair):
            found[which].append(delta)
    assert [len(joined(deltas)[0]) for deltas in found.values()] == [30, 30]
    left = llm.stream([8], SamplingParams(max_tokens=3000, ignore_eos=True))
    next(left)
    left.close()  # type: ignore[attr-defined]
    del unread
    llm.generate([9], params)
    assert llm.progress().running == 0 and llm.progress().counters["aborted"] >= 1


def test_what_came_while_others_were_read_is_put_together_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that texts of many answers are not made token by token once all have been computed."""
    params, push, pushed = SamplingParams(max_tokens=40, ignore_eos=True), Answer.push, Counter[Answer]()

    def counting(self: Answer, output: Any) -> Delta:
        pushed[self] += 1
        return push(self, output)

    monkeypatch.setattr(Answer, "push", counting)
    found = llm.generate([[5], [6], [7]], params)
    assert sorted(pushed.values())[:2] == [1, 1] and max(pushed.values()) > 30
    assert [one.token_ids for one in found] == [joined(list(llm.stream([n], params)))[0] for n in (5, 6, 7)]


def test_grammars_and_bad_ones(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=60, grammar=Grammar(kind="regex", text="[ab]{5}")),
        SamplingParams(max_tokens=60, grammar=Grammar(kind="regex", text="(")),
        SamplingParams(max_tokens=3),
    ]
    good, bad, free = llm.generate([[5], [6], [7]], params)
    assert len(good.text) == 5 and set(good.text) <= {"a", "b"} and good.finish_reason == "stop"
    assert bad.finish_reason == "error" and bad.error is not None and bad.error[0] == "grammar"
    assert free.token_ids == answer([7], 3)[0]
    free.raise_error()
    with pytest.raises(UsageError, match="ended with an error"):
        bad.raise_error()


def test_an_answer_of_no_numbers_is_the_models_fault(tmp_path: Path) -> None:
    with fake_llm(tmp_path / "m", Habits(poison=9)) as one:
        (found,) = one.generate([5, 9])
    with pytest.raises(ModelError, match="no numbers"):
        found.raise_error()


def test_stop_texts_wait_for_min_tokens(llm: LLM) -> None:
    """A text that the answer holds twice: the first place counts, or the second one when min_tokens lies between."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    tokens, _ = answer([5], 200)
    texts = [tokenizer.text_of(token) for token in tokens]
    stop, first = next((t, n) for n, t in enumerate(texts) if t.strip() and t in texts[n + 1 :] and t not in texts[:n])
    later = next(n for n in range(first + 1, len(texts)) if stop in texts[n])
    for least, at in ((0, first), (first, first), (first + 1, later)):
        (found,) = llm.generate([5], SamplingParams(max_tokens=200, stop=(stop,), min_tokens=least))
        assert (found.finish_reason, found.stop_reason, len(found.token_ids)) == ("stop", stop, at + 1)


def test_a_folder_that_vanishes_takes_no_grammars_with_it(tmp_path: Path) -> None:
    with fake_llm(tmp_path / "m") as one:
        shutil.rmtree(tmp_path / "m")
        (found,) = one.generate([5], SamplingParams(max_tokens=60, grammar=Grammar(kind="regex", text="[ab]{5}")))
        assert found.finish_reason == "stop" and len(found.text) == 5


def test_a_grammar_of_a_chat_begins_where_content_does(tmp_path: Path) -> None:
    """Behind the reasoning that the prompt opened; beside tools it is that or a call."""
    folder = tmp_path / "m"
    fake_launch(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}<tool_call><think>")
    schema, tool = Grammar(kind="regex", text="[ab]{5}"), Tool("look")
    with fake_llm(folder) as one:
        asked: list[NewRequest] = []
        submit = one._engine.submit
        one._engine.submit = lambda requests: (asked.extend(requests), submit(requests))[1]  # type: ignore[method-assign]
        for tools in ((), (tool,)):
            one.chat([{"role": "user", "content": "the ab"}], SamplingParams(max_tokens=9, grammar=schema), tools=tools)
    alone, beside = (request.params.grammar for request in asked)
    assert alone == Grammar(kind="regex", text="[ab]{5}", after=THOUGHT)
    assert beside is not None and beside.after == THOUGHT and "look" in beside.text and "[ab]{5}" in beside.text


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda one: one.generate([[5, VOCAB]]), "ids go from 0 to 329"),
        (lambda one: one.generate([[5], ["x"]]), "the prompt holds 'x'"),
        (lambda one: one.generate([[]]), "the prompt is empty"),
        (lambda one: one.generate([[5] * 5000]), "5000 tokens"),
        (lambda one: one.generate([[5], [6]], [SamplingParams()]), "2 prompts came with 1 params"),
        (lambda one: one.generate([5], SamplingParams(temperature=-1)), "temperature is -1"),
        (lambda one: one.generate([5], SamplingParams(max_tokens=3, min_tokens=4)), "min_tokens"),
        (lambda one: one.stream([5], SamplingParams(n=2)), "n is 2"),
        (lambda one: one.generate(None), "prompts must be"),
        (lambda one: one.generate(b"ab"), "prompts must be"),
        (lambda one: one.generate({"ab": 1}), "prompts must be"),
        (lambda one: one.generate([[5], 6]), "prompts must be"),
        (lambda one: one.stream(b"ab"), "prompt is a bytes"),
        (lambda one: one.generate([5], {"temperature": 0}), "params is a dict"),
        (lambda one: one.generate([5], "hot"), "3 params"),
        (lambda one: one.generate([5], "h"), "params is a str"),
    ],
)
def test_wrong_calls_are_one_sentence(llm: LLM, call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as told:
        call(llm)
    assert "\n" not in str(told.value)
    assert llm.progress().running == llm.progress().waiting == 0


def test_chat_renders_asks_and_takes_the_answer_apart(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    folder = tmp_path / "m"
    fake_launch(folder)
    (folder / "chat_template.jinja").write_text(template)
    with fake_llm(folder) as one:
        found = one.chat([{"role": "user", "content": "the ab"}], SamplingParams(max_tokens=12))
        ids = small_tokenizer().encode("user: the ab\n").ids
        assert found.output.prompt_token_ids == ids and found.output.token_ids == answer(ids, 12)[0]
        assert found.message.content == found.output.text and not found.message.tool_calls
        shape: list[tuple[Any, str]] = [([], "is empty"), ([{"role": "user"}], "must have"), ("hi", "is a str")]
        for messages, said in shape:
            with pytest.raises(UsageError, match=said):
                one.chat(messages)


def test_without_a_tokenizer_ids_work_and_texts_say_why(tmp_path: Path) -> None:
    with fake_llm(tmp_path / "m", text=False) as one:
        (found,) = one.generate([[5, 6]], SamplingParams(max_tokens=4))
        assert found.token_ids == answer([5, 6], 4)[0] and found.text == ""
        hello = [{"role": "user", "content": "a"}]
        stop = SamplingParams(stop=("a",))
        for call in (lambda: one.generate("a"), lambda: one.generate([5], stop), lambda: one.chat(hello)):
            with pytest.raises(UsageError, match="no tokenizer"):
                call()


def test_close_and_unknown_options(tmp_path: Path) -> None:
    one = fake_llm(tmp_path / "m")
    stream = one.stream([5], SamplingParams(max_tokens=3000, ignore_eos=True))
    next(stream)
    one.close()
    one.close()
    assert next(stream).finish_reason == "abort"
    for call in (lambda: one.generate([5]), one.progress):
        with pytest.raises(EngineDead, match="closed"):
            call()
    with pytest.raises(UsageError, match="no option 'max_runing'; did you mean max_running"):
        LLM(str(tmp_path / "m"), max_runing=3)
    for threads in (0, True, 10**9, "4"):
        with pytest.raises(UsageError, match="threads is"):
            LLM(str(tmp_path / "m"), threads=threads)
    with pytest.raises(UsageError, match="max_running is 0"):
        LLM(str(tmp_path / "m"), max_running=0)


def test_a_stream_may_outlive_the_model(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    one = fake_llm(tmp_path / "m")
    left, read = (one.stream([token], SamplingParams(max_tokens=3000, ignore_eos=True)) for token in (5, 6))
    assert next(left).finish_reason is None and next(read).finish_reason is None
    one.close()
    left.close()  # type: ignore[attr-defined]
    assert [delta.finish_reason for delta in read][-1] == "abort"
    assert not recwarn.list


def test_an_interrupt_waits_for_the_step_and_leaves_the_others_whole(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a step: the answer that was waited for ends, one that was open besides goes on."""

    class Interrupting(FakeExecutor):
        at: int | None = None

        def result(self, handle: int) -> StepResult:
            if handle == Interrupting.at:
                os.kill(os.getpid(), signal.SIGINT)
            return super().result(handle)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in its background ignores the signal
    fake_launch(tmp_path / "m")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for at in range(3, 9):
        Interrupting.at = None
        with LLM(str(tmp_path / "m"), make=Interrupting, debug=True) as one:
            open_stream = one.stream([5], params)
            found = [next(open_stream)]
            Interrupting.at = at
            with pytest.raises(KeyboardInterrupt):
                one.generate([[6], [7]], params)
            found += open_stream
            assert one.progress().running == one.progress().waiting == 0
            assert [t for delta in found for t in delta.token_ids] == one.generate([5], params)[0].token_ids
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_name_is_there_and_costs_nothing_until_used() -> None:
    program = (
        "import sys, dayzero\nassert not [m for m in sys.modules if m.startswith('dayzero.')]\n"
        "from dayzero import SamplingParams, LLM\nimport dayzero.engine.client\nassert 'torch' not in sys.modules\n"
        "try:\n    dayzero.LMM\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "module 'dayzero' has no attribute 'LMM'\n", done.stderr


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twin")
    (folder / "config.json").write_text((CONFIGS / "qwen3_8b.json").read_text())
    write_twin(str(folder / "config.json"), str(folder / "twin"))
    return folder / "twin"


OPTIONS: dict[str, Any] = {"dtype": "float32", "pool_bytes": 1 << 24, "debug": True, "bindings": (("*", "reference"),)}
PROMPTS = [[1, 2, 3], [5] * 70, list(range(100, 230)), [1, 2, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2)


def test_a_real_model_in_process_and_in_its_own_gives_the_same(twin: Path) -> None:
    with LLM(str(twin), **OPTIONS) as one:
        together = one.generate(PROMPTS, GREEDY)
        alone = [one.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        streamed = [joined(list(one.stream(prompt, GREEDY))) for prompt in PROMPTS]
        assert one.progress().counters["prefix_hits"] > 0
    assert [a.token_ids for a in alone] == [t.token_ids for t in together] == [s[0] for s in streamed]
    assert [a.text for a in alone] == [s[1] for s in streamed]

    async def remote() -> list[list[int]]:
        engine = AsyncEngine(LaunchSpec(source=str(twin), config=EngineConfig(**OPTIONS)))
        await engine.start()
        info = await engine.wait_ready()
        assert info.vocab == 512 and info.family == "qwen3"

        async def ask(number: int, prompt: list[int]) -> list[int]:
            request = NewRequest(id=f"r{number}", prompt=prompt, params=GREEDY)
            return [token async for output in engine.generate(request) for token in output.tokens]

        found = await asyncio.gather(*(ask(n, prompt) for n, prompt in enumerate(PROMPTS)))
        await engine.close()
        return list(found)

    assert asyncio.run(asyncio.wait_for(remote(), 60)) == [one.token_ids for one in together]


def test_the_publishers_code_is_an_executor_too(twin: Path) -> None:
    pytest.importorskip("transformers")
    upstream = {name: value for name, value in OPTIONS.items() if name not in ("bindings", "pool_bytes")}
    with LLM(str(twin), executor="upstream", **upstream) as one:
        assert one.info.family.startswith("upstream:")
        first = one.generate(PROMPTS, GREEDY)
        again = one.generate(PROMPTS, GREEDY)
        assert one.progress().counters["prefix_hits"] == 0
    with LLM(str(twin), **OPTIONS) as one:
        ours = one.generate(PROMPTS, GREEDY)
    assert [a.token_ids for a in first] == [a.token_ids for a in again] == [a.token_ids for a in ours]


def test_a_real_model_keeps_to_its_grammar(twin: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    with LLM(str(twin), **OPTIONS) as one:
        for seed in range(3):
            found = one.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=400, seed=seed, grammar=grammar))
            for answered in found:
                assert answered.finish_reason == "stop", answered
                assert json.loads(answered.text) in ({"a": 1}, {"a": 2})


def test_a_broken_checkpoint_is_told_the_same_way_by_the_process(twin: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((twin / "config.json").read_text())

    async def remote() -> None:
        engine = AsyncEngine(LaunchSpec(source=str(tmp_path), config=EngineConfig()))
        await engine.start()
        await engine.wait_ready()

    with pytest.raises(ValueError) as far:
        asyncio.run(asyncio.wait_for(remote(), 60))
    with pytest.raises(ValueError) as near:
        LLM(str(tmp_path))
    assert str(far.value) == str(near.value)
    assert far.value.exit_code == near.value.exit_code == 1  # type: ignore[attr-defined]
