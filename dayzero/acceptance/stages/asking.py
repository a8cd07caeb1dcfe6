"""How a stage asks a server that it knows nothing of, and keeps what it finds.

A check is a function of (Ask, Checks). What a foreign server does not offer, which is what it refuses, is not
applicable, with its answer as the reason; what a server of this package says that it offers must hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dayzero.acceptance.accept.cards import capabilities_of, card_of
from dayzero.acceptance.accept.http import Answer, Client, NoAnswer
from dayzero.acceptance.accept.stage import Context, Profile, RunningServer, StageResult, Subject
from dayzero.acceptance.stages.answers import PATHS, Api, Choice, Malformed, Refused, Reply, at, streamed, whole
from dayzero.acceptance.stages.ties import bound_of
from dayzero.console import ProgressFactory
from dayzero.errors import UserError
from dayzero.finding import Finding, Verdict

OWNER = "dayzero"
# Of whoever reads what a foreign server may send; a UserError is a ValueError too, and is never one of these.
SHAPELESS = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)
REFUSALS = (400, 404, 405, 415, 422, 501)  # how servers say that they do not offer something
NEEDED: Mapping[Api, str] = {"chat": "chat", "completions": "tokenizer"}  # capabilities of a card
QUESTION = "What is 2 + 2?"
PROMPT_ROOM = 512  # tokens of the server's limit that are left to a prompt
A_FEW = 24  # tokens that show whether a model reasons before it answers
MOST_THINKING, THINKING_SECONDS = 2048, 20.0  # that are waited for, to see how long it reasons
LAYER_OF_CODE = {"nan_logits": "operator"}  # errors that say themselves whose fault they are
# Tokens of the longest answers, with what is reasoned before them: none takes longer than an answer of one token did.
PATIENCE = 1000
SERVER_LOG = "See the server's log for this request."
# A server takes what a request leaves out from the checkpoint's generation_config.json, whose cuts are not the softmax.
# A foreign one is told of the field that all of them know; it may refuse the others.
NEUTRAL: Mapping[str, Any] = {"top_p": 1}
OURS_NEUTRAL: Mapping[str, Any] = {
    "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
}  # fmt: skip


class Ask:
    """One server, asked. timeout: seconds for an answer, at least; more on a machine that is slow. why_not: for each
    API that it refuses, what it said. ids: it gives token ids on request. ignores_stops: it takes ``ignore_eos``. ours:
    it is a server of this package."""

    def __init__(
        self, server: RunningServer, subject: Subject, profile: Profile = "quick", seed: int = 0, timeout: float = 60.0
    ) -> None:
        self._quickest = math.inf
        self.client = Client(server.address, server.headers, timeout)
        self.model, self.subject, self.profile, self.seed = server.model, subject, profile, seed
        self.card = card_of(self.client.get("/v1/models").json, self.model)
        self.ours = self.card.get("owned_by") == OWNER
        self.why_not: dict[Api, str] = {}
        for api in PATHS:
            answer = self.post(api, "Hi.", max_tokens=1, temperature=0)
            if not answer.ok:
                self.why_not[api] = f"{PATHS[api]} answered {answer.said}"
        self.ids = self._takes("return_token_ids") is not None
        self.ignores_stops = self._takes("ignore_eos") is not None
        if math.isfinite(self._quickest):  # a slow machine is no fault of a server's
            self.client = Client(server.address, server.headers, max(timeout, PATIENCE * self._quickest))

    def _takes(self, name: str) -> Reply | None:
        """An answer with this further field; None where it is refused, or token ids are asked for and do not come."""
        if self.api is None:
            return None
        answer = self.post(self.api, "Hi.", max_tokens=1, temperature=0, **{name: True})
        if not answer.ok:
            return None
        self._quickest = min(self._quickest, answer.seconds)
        try:
            found = whole(answer, self.api)
        except Malformed:
            return None
        return found if name != "return_token_ids" or found.one.ids is not None else None

    @property
    def apis(self) -> list[Api]:
        """Those it answers, chat first."""
        return [api for api in PATHS if api not in self.why_not]

    @property
    def api(self) -> Api | None:
        """Where answers are asked for: chat where there is one."""
        return next(iter(self.apis), None)

    def promises(self, capability: str) -> bool | None:
        """Of a server of this package, whether it says that it has it; None: it does not say."""
        found = capabilities_of(self.card)
        return bool(found[capability]) if self.ours and capability in found else None

    @property
    def rounding(self) -> float:
        """How far this server's log-probabilities may lie apart by arithmetic alone, in nat (``ties.bound_of``)."""
        packed = any(word.partition("=")[0] == "--cache" for word in self.subject.serve)  # rounds more than logits
        return bound_of("" if packed else str(self.card.get("dtype") or ""))

    @cached_property
    def thinking(self) -> int:
        """Tokens that an answer may spend on reasoning before it begins: twice what a first one spent; 0 of a model
        that does not reason, or that comes to no end of it."""
        if "chat" in self.why_not or self.promises("reasoning") is False:
            return 0
        try:
            first = self.whole("chat", QUESTION, temperature=0, max_tokens=A_FEW)
            if not first.one.reasoning and "think" not in first.one.text:
                return 0
            each, limit = first.answer.seconds / max(1, first.used.completion), self.card.get("max_model_len")
            most = min(MOST_THINKING, int(THINKING_SECONDS / max(each, 1e-6)))
            most = min(most, limit // 2) if isinstance(limit, int) else most
            full = self.whole("chat", QUESTION, temperature=0, max_tokens=max(A_FEW, most))
        except (Refused, Malformed):
            return 0
        return 0 if full.one.finish == "length" else 2 * full.used.completion

    def room(self, tokens: int) -> int:
        """``max_tokens`` for an answer of so many, with what the model reasons before it, as far as the server's limit
        leaves room for it behind a prompt."""
        limit, wanted = self.card.get("max_model_len"), tokens + self.thinking
        return max(tokens, min(wanted, limit - PROMPT_ROOM)) if isinstance(limit, int) else wanted

    def amount(self, quick: int, release_day: int, long: int) -> int:
        return {"quick": quick, "release-day": release_day, "long": long}[self.profile]

    # --- asking

    def body(self, api: Api, prompt: Any, **fields: Any) -> dict[str, Any]:
        """prompt: a text, messages, or token ids."""
        if api == "completions":
            asked = {"prompt": prompt}
        else:
            asked = {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}
        return {"model": self.model, **asked, **fields}

    def post(self, api: Api, prompt: Any, **fields: Any) -> Answer:
        return self.client.post(PATHS[api], self.body(api, prompt, **fields))

    def whole(self, api: Api, prompt: Any, **fields: Any) -> Reply:
        """Refused; Malformed; NoAnswer."""
        return whole(self.post(api, prompt, **self.extended(fields)), api)

    def streamed(self, api: Api, prompt: Any, **fields: Any) -> Reply:
        """With its usage. Refused; Malformed; NoAnswer."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return streamed(self.post(api, prompt, **self.extended(fields), **options), api)

    def extended(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """With what every request for an answer states, for ``post``."""
        more = {"return_token_ids": True} if self.ids else {}
        return {**NEUTRAL, **(OURS_NEUTRAL if self.ours else {}), **more, **fields}

    def scored(self, api: Api, count: int) -> dict[str, Any]:
        """The fields that ask for log-probabilities of the ``count`` likeliest tokens."""
        return {"logprobs": True, "top_logprobs": count} if api == "chat" else {"logprobs": count}

    def tokenized(self, **fields: Any) -> list[int]:
        """Ids by /tokenize. Refused; Malformed; NoAnswer."""
        answer = self.client.post("/tokenize", {"model": self.model, **fields})
        if not answer.ok:
            raise Refused(answer)
        return at(answer.json, "tokens", kind=list)

    def facts(self) -> dict[str, Any]:
        """How the server was asked, for the protocol: nothing that differs when the same is asked again."""
        where = {} if self.subject.url is None else {"address": self.client.address.text}
        return where | {
            "model": self.model, "ours": self.ours, "apis": self.apis,
            "refused": dict(self.why_not), "token ids told": self.ids, "ignore_eos taken": self.ignores_stops,
        }  # fmt: skip

    def alive(self) -> bool:
        try:
            return self.client.get("/v1/models").status < 500
        except NoAnswer:
            return False


def lost_in_thought(one: Choice) -> bool:
    """Whether an answer was cut off before its reasoning had come to an end: nothing of it can be judged."""
    return one.finish == "length" and bool(one.reasoning) and not one.text.strip() and not one.calls


@dataclass
class Checks:
    """Findings as they are made. samples: see StageResult."""

    stage: str
    findings: list[Finding] = field(default_factory=list)
    samples: dict[str, dict[str, float | bool]] = field(default_factory=dict)

    def judge(
        self,
        kind: str,
        claim: str,
        holds: bool,
        measured: Any = None,
        bound: Any = None,
        *,
        layer: str = "server",
        remedy: str = SERVER_LOG,
        bad: Verdict = "fail",
    ) -> None:
        """A pass, or ``bad`` with the remedy."""
        self._add(kind, layer, "pass" if holds else bad, claim, measured, bound, "" if holds else remedy)

    def skip(self, kind: str, claim: str, why: str, layer: str = "server") -> None:
        self._add(kind, layer, "not applicable", claim, why, None, "")

    def _add(
        self, kind: str, layer: str, verdict: Verdict, claim: str, measured: Any, bound: Any, remedy: str
    ) -> None:  # fmt: skip
        self.findings.append(Finding(f"{self.stage}.{kind}", layer, verdict, claim, measured, bound, (), remedy))

    def sample(self, name: str, item: str, value: float | bool) -> None:
        self.samples.setdefault(name, {})[item] = value


@dataclass(frozen=True)
class Check:
    """name: the finding's kind when the check itself cannot be made. capability: the word in a card of a server of this
    package that says whether it offers this; core: what every server must offer. layer: at fault when it is refused."""

    name: str
    claim: str
    run: Callable[[Ask, Checks], None]
    capability: str = ""
    core: bool = False
    layer: str = "server"
    apis: tuple[Api, ...] = ()


def judge_basics(ask: Ask, out: Checks) -> None:
    """Whether there is anything to ask at all, and what this server says it has."""
    for api in PATHS:
        promised = ask.promises(NEEDED[api])
        claim = f"{PATHS[api]} answers"
        if api in ask.why_not and (promised is False or (ask.apis and not ask.ours)):
            out.skip(f"offers.{api}", claim, ask.why_not[api])
        else:
            out.judge(f"offers.{api}", claim, api not in ask.why_not, ask.why_not.get(api, "yes"), "status 200")


def run_checks(ask: Ask, out: Checks, checks: Sequence[Check], progress: ProgressFactory) -> None:
    """Every check in turn. What a server does to one of them does not keep the others from being made, unless it has
    gone for good."""
    gone = ""
    with progress(out.stage, len(checks), "checks") as bar:
        for check in checks:
            bar.note(check.claim)
            if gone:
                out.skip(check.name, check.claim, gone, check.layer)
            else:
                gone = _run(ask, out, check)
            bar.advance()


def _run(ask: Ask, out: Checks, check: Check) -> str:
    """Make one check. Returns why no further one can be made; "" when they can."""
    for api in check.apis:
        if api in ask.why_not and not check.core and not (ask.ours and ask.promises(NEEDED[api])):
            out.skip(check.name, check.claim, ask.why_not[api], check.layer)
            return ""
    if ask.promises(check.capability) is False:
        out.skip(check.name, check.claim, f"the server says that it has no {check.capability}", check.layer)
        return ""
    try:
        check.run(ask, out)
    except Refused as error:
        _refused(ask, out, check, error.answer)
    except Malformed as error:
        out.judge(check.name, check.claim, False, str(error), "an answer of its API", layer=check.layer)
    except NoAnswer as error:
        alive = ask.alive()
        remedy = "The server died or hangs: see its log, and send this request again." if not alive else SERVER_LOG
        out.judge(check.name, check.claim, False, str(error), "an answer", layer=check.layer, remedy=remedy)
        return "" if alive else f"the server is gone since the check before ({check.claim})"
    except SHAPELESS as error:
        if ask.ours or isinstance(error, UserError):
            raise
        told = f"an answer of another shape than its API has ({type(error).__name__}: {error})"
        out.judge(check.name, check.claim, False, told, "an answer of its API", layer=check.layer)
    return ""


def _refused(ask: Ask, out: Checks, check: Check, answer: Answer) -> None:
    offered = check.core or ask.ours
    if answer.status in REFUSALS and not offered:
        out.skip(check.name, check.claim, f"refused with {answer.said}", check.layer)
        return
    bound = "status 200" if offered else f"status 200, or one of {REFUSALS} where it is not offered"
    error = answer.json.get("error") if isinstance(answer.json, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    layer = LAYER_OF_CODE.get(code, check.layer) if isinstance(code, str) else check.layer
    out.judge(check.name, check.claim, False, answer.said, bound, layer=layer)


def ask_all(stage: str, checks: Sequence[Check], context: Context) -> StageResult:
    """A stage that is checks of the shared server. Errors: those of starting it."""
    ask = Ask(context.services.shared(), context.subject, context.profile, context.seed)
    out = Checks(stage)
    judge_basics(ask, out)
    run_checks(ask, out, checks, context.progress)
    return StageResult(tuple(out.findings), facts=ask.facts(), samples=out.samples)
