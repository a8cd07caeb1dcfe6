"""What answers look like: the models' list, completions of each kind of prompt, chat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import quote

from dayzero.acceptance.accept.http import Answer
from dayzero.acceptance.stages import greedy
from dayzero.acceptance.stages.answers import CHAT, PATHS, Api, Choice, Malformed, Refused, Reply, at, whole
from dayzero.acceptance.stages.asking import Ask, Check, Checks

TEXT: tuple[Api, ...] = ("completions",)
ENDS = ("stop", "length", "tool_calls", "content_filter", "function_call")
LONG_TEXT = "Be very brief. " * 4
FIELD = "Give every field that the API's reference names, with its type."


def checks() -> tuple[Check, ...]:
    return (
        Check("models", "/v1/models lists what is served", _models, core=True),
        Check("models.limit", "the list tells the true limit of a request", _limit),
        Check("chat.shape", "a chat answer has the fields of its API", _chat, apis=CHAT),
        Check("chat.parts", "content may be a list of parts", _parts, apis=CHAT),
        Check("chat.roles", "all roles are taken", _roles, apis=CHAT),
        Check("chat.limits", "both names of the token limit are taken", _limits, apis=CHAT),
        Check("completions.shape", "a completion has the fields of its API", _completion, apis=TEXT),
        Check("completions.many", "several prompts get an answer each", _many, apis=TEXT),
        Check("completions.ids", "prompts of token ids are taken", _ids, apis=TEXT),
        Check("fields.null", "optional fields may be null", _nulls),
    )  # fmt: skip


def _models(ask: Ask, out: Checks) -> None:
    answer = ask.client.get("/v1/models")
    if not answer.ok:
        raise Refused(answer)
    body = answer.json
    out.judge("models.list", "the models' list is one", at(body, "object", kind=str) == "list", body["object"], "list",
              remedy=FIELD)  # fmt: skip
    cards = at(body, "data", kind=list)
    for number, card in enumerate(cards):
        for name, kind in (("id", str), ("object", str), ("created", int), ("owned_by", str)):
            at(body, "data", number, name, kind=kind)
        if card["object"] != "model":
            raise Malformed(f"data[{number}].object is {card['object']!r}, not 'model'")
    ids = [card["id"] for card in cards]
    out.judge("models", "each model has its id, object, created and owned_by", bool(ids), ids, "one or more",
              remedy=FIELD)  # fmt: skip
    out.judge(
        "models.names", "the model that is asked for is in the list, once", ids.count(ask.model) == 1, ids, ask.model,
        remedy="List what is served, each name once.",
    )  # fmt: skip
    one = ask.client.get(f"/v1/models/{quote(ask.model, safe='/')}")
    same = one.ok and isinstance(one.json, dict) and one.json.get("id") == ask.model
    out.judge(
        "models.one", "/v1/models/NAME tells of one", same, one.status if same else one.said, "its card",
        bad="fail" if ask.ours else "note", remedy="Serve /v1/models/{model}, slashes in the name included.",
    )  # fmt: skip


def _limit(ask: Ask, out: Checks) -> None:
    claim = "max_model_len is the true limit: one token more is refused, with 400"
    limit = ask.card.get("max_model_len")
    if not isinstance(limit, int) or "completions" in ask.why_not:
        out.skip("models.limit", claim, "the card has no max_model_len, or ids cannot be sent")
        return
    over = ask.post("completions", [1] * limit, max_tokens=1)
    remedy = "Tell the limit that is in force, and check requests against it."
    out.judge("models.limit", claim, over.status == 400, over.said, "400", layer="scheduler", remedy=remedy)
    if not ask.ours:  # one that does not notice that its client has left would be busy with it for long
        return
    just = ask.client.status_of(PATHS["completions"], ask.body("completions", [1], max_tokens=limit - 1, stream=True))
    out.judge(
        "models.limit-held", "and a request of just so many tokens is taken", just == 200, just, "200",
        layer="scheduler", remedy=remedy,
    )  # fmt: skip


def _common(body: Any, kind: str, ask: Ask) -> None:
    """Malformed says what is missing."""
    if not at(body, "id", kind=str):
        raise Malformed("the answer.id is empty")
    if at(body, "object", kind=str) != kind:
        raise Malformed(f"the answer.object is {body['object']!r}, not {kind!r}")
    at(body, "created", kind=int)
    if at(body, "model", kind=str) != ask.model:
        raise Malformed(f"the answer.model is {body['model']!r}, and {ask.model!r} was asked")


def _checked(ask: Ask, api: Api, prompt: Any, **fields: Any) -> tuple[Answer, dict[str, Any]]:
    answer = ask.post(api, prompt, temperature=0, max_tokens=4, **fields)
    _ = whole(answer, api).used  # Refused, Malformed
    return answer, answer.json


def _chat(ask: Ask, out: Checks) -> None:
    answer, body = _checked(ask, "chat", "Hello.")
    _common(body, "chat.completion", ask)
    role = at(body, "choices", 0, "message", "role", kind=str)
    end = at(body, "choices", 0, "finish_reason", kind=str)
    out.judge("chat.shape", "a chat answer has the fields of its API", role == "assistant" and end in ENDS,
              f"{role}, {end}", f"assistant, one of {ENDS}", remedy=FIELD)  # fmt: skip
    kind = answer.headers.get("content-type", "")
    out.judge("chat.type", "answers are application/json", kind.startswith("application/json"), kind,
              "application/json", remedy="Set the Content-Type.")  # fmt: skip
    other = _checked(ask, "chat", "Hello.")[1]
    num_ids = len({body["id"], other["id"]})
    out.judge("chat.id", "each answer has an id of its own", num_ids == 2, f"{num_ids} of 2 answers", 2,
              remedy="Draw an id for each request.")  # fmt: skip


def _parts(ask: Ask, out: Checks) -> None:
    text = "Say a word."
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    one, two = (ask.whole("chat", given, temperature=0, max_tokens=4) for given in (text, parts))
    out.judge(
        "chat.parts", "a list of one text part is the same prompt as the text", one.used.prompt == two.used.prompt,
        (one.used.prompt, two.used.prompt), "equal prompt_tokens",
        remedy="Join text parts before the template sees them.",
    )  # fmt: skip


def _roles(ask: Ask, out: Checks) -> None:
    turns = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."},
             {"role": "user", "content": "Three."}]  # fmt: skip
    refused, ignored = {}, []
    for role in ("system", "developer"):
        # two texts, since a template may write one of its own where none is given, which may be longer
        asked = [[{"role": role, "content": text}, *turns] for text in ("Be very brief.", LONG_TEXT)]
        answers = [ask.post("chat", messages, temperature=0, max_tokens=1) for messages in asked]
        bad = next((answer for answer in answers if not answer.ok), None)
        if bad is not None:
            refused[role] = bad.said
            continue
        brief, long = (whole(answer, "chat").used.prompt for answer in answers)
        if long <= brief:
            ignored.append(role)
    out.judge(
        "chat.roles", "messages of system and developer are taken, and reach the prompt", not refused and not ignored,
        {"refused": refused, "ignored": ignored}, "both", layer="tokenizer+template",
        bad="fail" if ask.ours or ignored else "note",
        remedy="Treat developer as system where the template does not know it.",
    )  # fmt: skip


def _limits(ask: Ask, out: Checks) -> None:
    ignore = {"ignore_eos": True} if ask.ignores_stops else {}
    new = ask.whole("chat", "Count.", temperature=0, max_completion_tokens=3, **ignore).used.completion
    answer = ask.post("chat", "Count.", temperature=0, max_tokens=3, max_completion_tokens=3, **ignore)
    out.judge(
        "chat.limits", "max_completion_tokens is a limit, and may stand beside max_tokens", new <= 3 and answer.ok,
        f"{new} tokens; both: {answer.status if answer.ok else answer.said}", "3 at most, and 200",
        remedy="Take both names; of two values the smaller one.",
    )  # fmt: skip


def _completion(ask: Ask, out: Checks) -> None:
    _, body = _checked(ask, "completions", "One, two,")
    _common(body, "text_completion", ask)
    end = at(body, "choices", 0, "finish_reason", kind=str)
    out.judge("completions.shape", "a completion has the fields of its API", end in ENDS, end, f"one of {ENDS}",
              remedy=FIELD)  # fmt: skip


def _many(ask: Ask, out: Checks) -> None:
    prompts = ["One, two,", "The sea is", "Red, green,"]
    alone = [ask.whole("completions", prompt, temperature=0, max_tokens=4) for prompt in prompts]
    together = ask.whole("completions", prompts, temperature=0, max_tokens=4)
    out.judge(
        "completions.many", "several prompts in one request get the answers they get alone, in order",
        [one.index for one in together.choices] == [0, 1, 2]
        and all(_same(ask, *each) for each in zip(prompts, alone, together.choices)),
        [(one.index, one.text) for one in together.choices], [reply.one.text for reply in alone],
        remedy="Number the choices as the prompts come.",
    )  # fmt: skip


def _same(ask: Ask, prompt: Any, first: Reply, other: Choice) -> bool:
    """One greedy answer as another, but for a tie that rounding turns over in other company."""
    parted = greedy.parted(ask, "completions", prompt, first, replace(first, choices=[other]))
    return parted is None or parted.tie


def _ids(ask: Ask, out: Checks) -> None:
    text = "One, two,"
    ids = ask.tokenized(prompt=text)
    of_text = ask.whole("completions", text, temperature=0, max_tokens=4)
    of_ids = ask.whole("completions", ids, temperature=0, max_tokens=4)
    of_lists = ask.whole("completions", [ids, ids], temperature=0, max_tokens=4)
    same = _same(ask, text, of_text, of_ids.one) and of_text.used.prompt == of_ids.used.prompt == len(ids)
    out.judge(
        "completions.ids", "a prompt of ids gives the answer of its text", same,
        [(one.one.text, one.used.prompt) for one in (of_text, of_ids)], f"equal, {len(ids)} tokens",
        layer="tokenizer+template", remedy="Take ids as they are, and add none.",
    )  # fmt: skip
    out.judge(
        "completions.lists", "several prompts of ids get an answer each",
        len(of_lists.choices) == 2 and all(_same(ask, ids, of_ids, one) for one in of_lists.choices),
        [one.text for one in of_lists.choices],
        "two equal answers", remedy="Take lists of lists of ids.",
    )  # fmt: skip


def _nulls(ask: Ask, out: Checks) -> None:
    """Load generators and frameworks send every field they know."""
    names = ("stop", "seed", "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "user",
             "stream", "stream_options", "logprobs")  # fmt: skip
    answers = {name: ask.post(ask.api or "chat", "Hello.", max_tokens=1, **{name: None}) for name in names}
    refused = {name: answer.said for name, answer in answers.items() if not answer.ok}
    out.judge(
        "fields.null", "optional fields may be null", not refused, refused or f"{len(names)} fields", "status 200",
        bad="fail" if ask.ours or any(answer.status >= 500 for answer in answers.values()) else "note",
        remedy="Take null as not given.",
    )  # fmt: skip


def path_of(ask: Ask) -> str:
    return PATHS[ask.api or "chat"]
