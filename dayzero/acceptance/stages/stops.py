"""Where answers end, and what is counted: stop strings and ids, token limits, usage."""

from __future__ import annotations

from typing import Any

from dayzero.acceptance.stages.answers import Api, Refused, Reply
from dayzero.acceptance.stages.asking import Ask, Check, Checks
from dayzero.acceptance.stages.metrics import read_numbers
from dayzero.acceptance.stages.robust_ask import eventually

PROMPT = "Write a few words about rivers and mountains."
LENGTHS = (1, 2, 7)
NEVER = "\x01no model writes this\x01"
MOST_STOP_IDS = 4
CUT = "Cut the text before the stop string, also where it lies across tokens, and hold back what may yet become one."
OVERRUN = "The server handed on the limit that was asked for: count where an answer is ended, before its last token."
COUNT = "Count the ids that were generated, the stop token included, once, and in both modes by the same code."
LIMITS = "request_params_max_tokens_sum"  # metric: of the limits of all requests, as the engine was given them
COUNTED_SECONDS = 5.0  # until a metric counts an answer that has ended
ENOUGH_TOKENS = 8  # of an answer, so that its middle is not its end


def checks() -> tuple[Check, ...]:
    return (
        Check("stop.string", "a stop string ends the answer before it", _strings, core=True),
        Check("stop.ids", "stop_token_ids end the answer", _ids),
        Check("stop.model", "each of the model's own stop ids ends an answer", _own_ids, layer="tokenizer+template"),
        Check("tokens.max", "max_tokens is held exactly", _lengths, core=True),
        Check("usage.modes", "usage is the same in both modes", _usage, core=True),
    )


def _ask(ask: Ask, api: Api, **more: Any) -> Reply:
    return ask.whole(api, PROMPT, temperature=0, **more)


def cut_text(text: str) -> str | None:
    """A piece of ``text``, three characters or fewer, that first comes somewhere in its middle; None: there is none."""
    for size in (3, 2, 1):
        for start in sorted(range(1, len(text) - size), key=lambda i: abs(i - len(text) // 2)):
            piece = text[start : start + size]
            if text.index(piece) == start and "\ufffd" not in piece and piece.isprintable() and piece.strip():
                return piece
    return None


def _strings(ask: Ask, out: Checks) -> None:
    for api in ask.apis:
        told = _ask(ask, api, max_tokens=24)
        full, text = told.one, told.one.text
        piece = None if full.reasoning else cut_text(text)
        claim = f"a stop string ends the answer before it ({api})"
        if piece is None:
            out.skip(f"stop.string-{api}", claim, f"nothing to cut in {full.said[:40]!r}")
            continue
        wanted = (text[: text.index(piece)], "stop")
        ways = {
            "whole": _ask(ask, api, max_tokens=24, stop=piece),
            "streamed": ask.streamed(api, PROMPT, temperature=0, max_tokens=24, stop=[piece]),
            "of several": _ask(ask, api, max_tokens=24, stop=[NEVER, piece]),
        }
        wrong = {way: reply.one for way, reply in ways.items() if (reply.one.text, reply.one.finish) != wanted}
        shown = {way: (one.text[-20:], one.finish) for way, one in wrong.items()}
        out.judge(
            f"stop.string-{api}", claim, not wrong, shown or f"{len(ways)} ways", f"{wanted[0][-20:]!r}, 'stop'",
            remedy=CUT,
        )  # fmt: skip
        claim = f"a stop string ends the work too ({api})"
        if "whole" in wrong:
            out.skip(f"stop.work-{api}", claim, "the stop string was not found at all", "scheduler")
            continue
        used, most = ways["whole"].used.completion, told.used.completion
        if most >= ENOUGH_TOKENS:  # it is cut in the middle: who takes all of them has worked on behind it
            most -= 1
        out.judge(
            f"stop.work-{api}", claim, 0 < used <= most,
            f"{used} tokens", f"1 to {most}; the whole answer has {told.used.completion}", layer="scheduler",
            remedy="End the request in the engine when its text holds a stop string.",
        )  # fmt: skip


def _ids(ask: Ask, out: Checks) -> None:
    claim = "stop_token_ids end the answer, and are not shown"
    api = ask.api or "chat"
    full = _ask(ask, api, max_tokens=16).one
    ids = full.ids or []
    place = next((i for i in range(len(ids) // 2, len(ids)) if ids.index(ids[i]) == i), None)
    if place is None or full.reasoning:
        out.skip("stop.ids", claim, "token ids are not told" if full.ids is None else "no id to stop at in the answer")
        return
    ended = _ask(ask, api, max_tokens=16, stop_token_ids=[ids[place]])
    one = ended.one
    shorter = full.text.startswith(one.text) and len(one.text) <= len(full.text)
    out.judge(
        "stop.ids", claim, one.finish == "stop" and shorter and (one.ids or [])[:place] == ids[:place]
        and ended.used.completion in (place, place + 1),
        f"{one.finish!r} after {ended.used.completion} tokens", f"'stop' after {place} tokens and the stop token",
        remedy="Compare each sampled id with the request's stop_token_ids.",
    )  # fmt: skip


def _own_ids(ask: Ask, out: Checks) -> None:
    """Every source that names a stop id is right: a model that is trained to end with one of them must be heard."""
    from dayzero.acceptance.stages.rendering import own_chat

    claim = "each of the model's own stop ids ends an answer"
    chat, why = own_chat(ask.subject)
    if chat is None or not chat.stop_ids:
        out.skip("stop.model", claim, why or "the checkpoint names no stop id", "tokenizer+template")
        return
    api, deaf = ask.api or "chat", {}
    for stop in sorted(chat.stop_ids)[:MOST_STOP_IDS]:
        reply = _ask(ask, api, max_tokens=3, logit_bias={str(stop): 100})
        if reply.one.finish != "stop" or reply.one.said.strip() or reply.used.completion > 1:
            deaf[stop] = (reply.one.finish, reply.one.said[:20], reply.used.completion)
    out.judge(
        "stop.model", claim, not deaf, deaf or f"{min(len(chat.stop_ids), MOST_STOP_IDS)} ids",
        "'stop' with the first token, and no text", layer="tokenizer+template",
        remedy="Take the stop ids of config, generation_config, tokenizer and template together; show none of them.",
    )  # fmt: skip


def _lengths(ask: Ask, out: Checks) -> None:
    ignore = {"ignore_eos": True} if ask.ignores_stops else {}
    for api in ask.apis:
        wrong, cut, beyond = {}, 0, True
        for length in LENGTHS:
            for stream in (False, True):
                fields = {"temperature": 0, "max_tokens": length, **ignore}
                reply = (ask.streamed if stream else ask.whole)(api, PROMPT, **fields)
                used, finish = reply.used.completion, reply.one.finish
                given = len(reply.one.ids) if reply.one.ids is not None else used
                cut += finish == "length"
                right = used == length if finish == "length" else finish == "stop" and used <= length and not ignore
                if not right or given != used:
                    wrong[f"{length}{' streamed' * stream}"] = f"{used} tokens ({given} ids), {finish!r}"
                    beyond &= given == used > length
        overran = bool(wrong) and beyond and _handed_on(ask, api, LENGTHS[-1])
        out.judge(
            f"tokens.max-{api}", f"max_tokens is held exactly ({api})", not wrong,
            wrong or f"{cut} of {2 * len(LENGTHS)} answers cut", "so many tokens and finish_reason 'length'",
            layer="scheduler" if overran else "server",
            remedy=OVERRUN if overran else "Count generated tokens, and say 'length' when they end an answer.",
        )  # fmt: skip


def _handed_on(ask: Ask, api: Api, length: int) -> bool:
    """Whether the server, by its own metric, gives its engine the very limit that it is asked for."""
    before = read_numbers(ask.client).get(LIMITS)
    if before is None:
        return False
    _ask(ask, api, max_tokens=length)
    grown = eventually(lambda: read_numbers(ask.client).get(LIMITS) == before + length, COUNTED_SECONDS)
    return grown is not None


def _usage(ask: Ask, out: Checks) -> None:
    for api in ask.apis:
        fields = {"temperature": 0, "max_tokens": 9}
        reply, stream = ask.whole(api, PROMPT, **fields), ask.streamed(api, PROMPT, **fields)
        told = [(one.prompt, one.completion, one.total) for one in (reply.used, stream.used)]
        out.judge(
            f"usage.modes-{api}", f"usage is the same streamed as whole ({api})", told[0] == told[1], f"{told}",
            "equal (prompt, completion, total)", remedy=COUNT,
        )  # fmt: skip
        sums = [prompt + completion == total for prompt, completion, total in told]
        out.judge(f"usage.total-{api}", f"total is prompt and completion ({api})", all(sums), f"{told}", remedy=COUNT)
        cached = [one.used.cached for one in (reply, stream)]
        held = all(one is not None and 0 <= one <= reply.used.prompt for one in cached)
        out.judge(
            f"usage.cached-{api}", f"usage tells what came from the cache ({api})", held, cached,
            "prompt_tokens_details.cached_tokens, of the prompt", layer="cache",
            bad="fail" if ask.ours or None not in cached else "note",
            remedy="Give prompt_tokens_details.cached_tokens; bills and routers read it.",
        )  # fmt: skip
        _exact(ask, out, api, reply)
        _prompt_once(ask, out, api, reply)


def _exact(ask: Ask, out: Checks, api: Api, reply: Reply) -> None:
    """Against ids that the server itself tells."""
    used, counted = reply.used, {}
    if reply.one.ids is not None:
        counted["completion ids"] = (used.completion, len(reply.one.ids))
    if reply.prompt_ids is not None:
        counted["prompt ids"] = (used.prompt, len(reply.prompt_ids))
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if api == "chat" else {"prompt": PROMPT}
    try:
        counted["/tokenize"] = (used.prompt, len(ask.tokenized(**asked)))
    except Refused:
        pass  # not every server has it
    claim = f"usage counts the tokens exactly ({api})"
    if not counted:
        out.skip(f"usage.exact-{api}", claim, "the server tells no ids, and has no /tokenize")
        return
    wrong = {name: pair for name, pair in counted.items() if pair[0] != pair[1]}
    out.judge(
        f"usage.exact-{api}", claim, not wrong, wrong or sorted(counted), "usage equals the number of ids", remedy=COUNT
    )


def _prompt_once(ask: Ask, out: Checks, api: Api, reply: Reply) -> None:
    claim = f"a prompt answered twice counts once, its answers are added up ({api})"
    try:
        pair = ask.whole(api, PROMPT, temperature=0, max_tokens=9, n=2)
    except Refused as error:
        if ask.ours:
            raise
        out.skip(f"usage.n-{api}", claim, f"n 2 refused with {error}")
        return
    wanted = (reply.used.prompt, 2 * reply.used.completion)
    given = (pair.used.prompt, pair.used.completion)
    out.judge(f"usage.n-{api}", claim, given == wanted, given, wanted, remedy=COUNT)
    same = [one.index for one in pair.choices] == [0, 1] and len({one.said for one in pair.choices}) == 1
    out.judge(
        f"choices.n-{api}", f"n 2 at temperature 0 gives two equal choices, numbered 0 and 1 ({api})", same,
        [(one.index, one.said[:20]) for one in pair.choices], "two equal ones",
        remedy="Answer every choice, number them, and let none change another.",
    )  # fmt: skip
