"""What a running server answers, and where it stops: reached, ready, lists a model, completes a prompt."""

from __future__ import annotations

from collections.abc import Mapping

from dayzero.acceptance.accept.cards import names_of
from dayzero.acceptance.accept.http import Client, NoAnswer
from dayzero.acceptance.doctor.diagnosis import Diagnosis, Placed, Target, diagnose
from dayzero.acceptance.doctor.rules import SERVICE
from dayzero.finding import Finding

SECONDS = 60.0
LOG = "Read the last lines of the server's log; for one of ours, dayzero doctor SOURCE looks at the checkpoint."


def diagnose_url(url: str, headers: Mapping[str, str] | None = None, seconds: float = SECONDS) -> Diagnosis:
    """Ask the server at ``url`` (its root, without ``/v1``). Errors: UsageError when it is no address."""
    client = Client(url, headers, seconds)
    return diagnose(Target(url, url=url), [Placed(SERVICE, one) for one in _asked(client)])


def _asked(client: Client) -> list[Finding]:
    """One finding a step, until one fails: what comes after it could not be judged."""
    try:
        listed = client.get("/v1/models")
    except NoAnswer as error:
        return [_fail("reached", "the server answers", str(error), "an HTTP answer",
                      "Start it, or mend the address; its log says why it ended.")]  # fmt: skip
    found = [Finding("server.reached", "server", "pass", "the server answers", f"{listed.status}")]
    if listed.status in (401, 403):
        return [*found, _fail("key", "it accepts the key", listed.said, 200, "Give --api-key.")]
    if listed.status == 503:
        return [*found, _fail("ready", "its engine is ready", listed.said, 200, LOG)]
    names = names_of(listed.json)
    if not listed.ok or not names:
        return [*found, _fail("models", "it lists a model", listed.said, "a list with one id or more", LOG)]
    found.append(Finding("server.models", "server", "pass", "it lists a model", ", ".join(names)))
    return [*found, _completion(client, names[0])]


def _completion(client: Client, model: str) -> Finding:
    claim = "it completes a prompt"
    body = {"model": model, "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
    try:
        answer = client.post("/v1/completions", body)
        if answer.status in (404, 405, 501):  # a server of chat alone
            chat = {"model": model, "messages": [{"role": "user", "content": "One, two, three,"}], "max_tokens": 4}
            answer = client.post("/v1/chat/completions", chat)
    except NoAnswer as error:
        return _fail("answers", claim, str(error), "an answer", LOG)
    choices = answer.json.get("choices") if isinstance(answer.json, dict) else None
    if answer.ok and isinstance(choices, list) and choices:
        return Finding("server.answers", "server", "pass", claim, f"{answer.seconds:.2f} s")
    return _fail("answers", claim, answer.said, "200 and a choice", LOG)


def _fail(kind: str, claim: str, measured: str, bound: object, remedy: str) -> Finding:
    return Finding(f"server.{kind}", "server", "fail", claim, measured, bound, (), remedy)
