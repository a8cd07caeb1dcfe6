"""What the robustness stage makes of what it saw."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from dayzero.acceptance.load.figures import Figures
from dayzero.acceptance.stages import robust_memory
from dayzero.acceptance.stages.long_known import Known
from dayzero.acceptance.stages.robust_load import Burst, Flood, Storm
from dayzero.acceptance.stages.robust_process import DEATH_SECONDS, Drained, Frozen, Killed
from dayzero.acceptance.stages.robust_same import Difference, difference
from dayzero.acceptance.stages.robust_soak import Load, Soak
from dayzero.finding import Finding, Verdict
from dayzero.units import bytes_text

MOST_EVIDENCE = 20
MOST_OF_SIZES = 1 << 30
CUT_SHARE = 0.5  # of answers that clients left, at least
WHOLE_SHARE = 0.25  # of clients that left; fewer answers made to their end were only quicker than a client that goes
CLIFF = 0.5  # of the best throughput that must be left when more is asked than runs at once


def _finding(
    kind: str, layer: str, wrong: bool, claim: str, measured: str, bound: str, remedy: str, evidence: Sequence[str] = ()
) -> Finding:  # fmt: skip
    shown = tuple(evidence)[:MOST_EVIDENCE]
    verdict: Verdict = "fail" if wrong else "pass"
    return Finding(f"robust.{kind}", layer, verdict, claim, measured, bound, shown, remedy if wrong else "")


def _softened(finding: Finding, why: bool) -> Finding:
    """A note where it would fail, since something besides a fault can be the cause."""
    return replace(finding, verdict="note") if why and finding.verdict == "fail" else finding


def _not_applicable(kind: str, layer: str, claim: str, why: str) -> Finding:
    return Finding(f"robust.{kind}", layer, "not applicable", claim, measured=why)


# --- load ------------------------------------------------------------------------------------------------------------


def soak(seen: Soak, load: Load, known: Known, bound: float) -> list[Finding]:
    counts = seen.counts
    unasked = [one.error for one in load.alone if not one.good]
    mixed = all(counts[kind] for kind in ("answers", "left", "bad"))
    said = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    how = (
        "bitwise, since every operator is a reference" if bound == 0 else f"but where the two best are {bound:g} apart"
    )
    return [
        _finding(
            "soak.alone", "server", bool(unasked), "each prompt of the load is answered with nobody beside it",
            f"{len(unasked)} of {len(load.alone)} were not" + (f": {unasked[0]}" if unasked else ""), "all",
            "Nothing below means much until single requests are answered.", unasked,
        ),
        _finding(
            "soak.mixed", "scheduler", not mixed, "the mixed load kept the server busy with all that it is made of",
            f"{said or 'nothing'} in {seen.seconds:.0f} s", "answers, clients that left, and bad requests",
            "The server answered too little in this time for the load to mean anything: take a longer profile.",
        ),
        _finding(
            "soak.answered", "server", bool(seen.failed), "every good request of the mixed load is answered",
            f"{len(seen.failed)} of {counts['answers']} were not" + (f": {seen.failed[0]}" if seen.failed else ""),
            "all, but those refused with 429", "See the server's log for the first of them.", seen.failed,
        ),
        _softened(_finding(
            "soak.same", "scheduler", bool(seen.wrong), "an answer under load is the one that the prompt gets alone",
            f"{len(seen.wrong)} of {counts['answers']} differ, {seen.parted} part at a tie"
            + (f"; {seen.wrong[0]}" if seen.wrong else ""),
            f"none, {how}", "An answer depends on its company: serve with --bind '*=reference', then with "
            "--no-prefix-cache, then with --max-running 1, to tell operator, cache and scheduler apart.",
            seen.wrong,
        ), not known.ids),
        _finding(
            "soak.refused", "server", bool(seen.not_refused), "a bad request among good ones is refused",
            f"{len(seen.not_refused)} of {counts['bad']} were not"
            + (f": {seen.not_refused[0]}" if seen.not_refused else ""),
            "4xx each", "Refuse what cannot be served, with the field's name.", seen.not_refused,
        ),
    ]  # fmt: skip


def memory(seen: Soak, small_pool: bool) -> Finding:
    """Growth behind the warm-up."""
    claim = "memory does not grow under mixed load"
    if not seen.memory or not any(seen.memory[-1][1]):
        return _not_applicable("soak.memory", "server", claim, "the server's processes are not ours to see")
    try:
        rate, t = robust_memory.slope(seen.series())
    except ValueError as error:
        return _not_applicable("soak.memory", "server", claim, str(error))
    wrong = robust_memory.grows(seen.series())
    last = seen.memory[-1][1]
    slopes = [robust_memory.slope(seen.series(i))[0] for i in range(len(last))]
    names = ("HTTP process", "engine process")
    each = [f"{names[i] if i < 2 else i}: {bytes_text(n)}, {s / 2**20:+.2f} MiB an hour" for i, (n, s) in
            enumerate(zip(last, slopes, strict=True))]  # fmt: skip
    grown = slopes.index(max(slopes))
    return _softened(_finding(
        "soak.memory", "server" if grown == 0 else "cache", wrong, claim,
        f"{rate / 2**20:+.2f} MiB an hour (t {t:+.2f}) in {seen.seconds:.0f} s",
        f"t {robust_memory.T_995_8}, and {robust_memory.ARENA_SHARE:.0%} of what is held or "
        f"{bytes_text(robust_memory.ARENA_BYTES)}",
        "Take a longer profile to see whether it goes on; which process grows is in the evidence."
        + ("" if small_pool else " The pool could not be made small: its first use is growth too."),
        each,
    ), not small_pool)  # fmt: skip


def sizes(grown: int, tried: int, step_tokens: int) -> Finding:
    """grown: bytes, over so many sizes of steps. step_tokens: sizes that there are with the subject's own options."""
    each = max(0, grown) / max(1, tried)
    return _softened(
        _finding(
            "sizes.memory", "operator", each * step_tokens > MOST_OF_SIZES,
            "what is kept for each size of a step stays small", f"{bytes_text(int(each))} for each of {tried} sizes: "
            f"{bytes_text(int(each * step_tokens))} for the {step_tokens} that there are",
            f"{bytes_text(MOST_OF_SIZES)} for all of them, which no plan counts",
            "A library keeps a compiled product for each number of rows: bound it, or lower --max-step-tokens.",
        ),
        True,
    )  # fmt: skip


def held(when: str, left: dict[str, float] | None) -> Finding:
    claim = f"nothing is held behind the {when}"
    if left is None:
        return _not_applicable(f"{when}.held", "cache", claim, "the server exports no numbers of what it holds")
    still = {name: value for name, value in left.items() if value}
    layer = "scheduler" if any(name.startswith("num_requests") for name in still) else "cache"
    said = ", ".join(f"{name} {value:g}" for name, value in (still or left).items())
    return _finding(
        f"{when}.held", layer, bool(still), claim, said, "0 requests running and waiting, 0 of the pool in use",
        "Blocks or slots of clients that left are not given back: serve with --check-engine.", tuple(still),
    )  # fmt: skip


def fragmentation(before: str | None, after: str | None, limit: int | None) -> Finding:
    claim = "behind the soak, the longest sequence finds as much room as before it"
    if before is None or after is None or limit is None:
        why = "the pool is larger than this load can use up"
        return _not_applicable("soak.fragmentation", "cache", claim, why)
    if before:
        return _not_applicable("soak.fragmentation", "cache", claim, f"it was not answered before either: {before}")
    return _finding(
        "soak.fragmentation", "cache", bool(after), claim, after or f"{limit:,} tokens, as before", f"{limit:,} tokens",
        "The pool is in pieces, or part of it is lost: serve with --check-engine.",
    )  # fmt: skip


def storm(seen: Storm, bound: float) -> list[Finding]:
    same = difference(seen.before, seen.after, bound)
    said = f"{seen.clients} clients left"
    return [
        held("storm", seen.left),
        _cut(seen),
        _finding(
            "storm.same", "cache", not same.same, "behind a storm of clients that vanish, an answer is what it was",
            f"{said}; {same.why or 'the same'}", "the same answer",
            "What they left behind is read by others: is a block given away while a step still writes it?",
        ),
    ]  # fmt: skip


def _cut(seen: Storm) -> Finding:
    """Whether the work of clients that left was ended, by the server's own word: without it, what is held behind the
    storm says only that the work was over."""
    claim = "the work for a client that vanishes is ended"
    if "abort" not in seen.ends:
        return _not_applicable("storm.cut", "scheduler", claim, "the server does not count answers that were cut off")
    if not seen.exact:
        why = "the server refuses ignore_eos, so that an answer may have ended before its client left"
        return _not_applicable("storm.cut", "scheduler", claim, why)
    cut, whole = _ended(seen)
    if not cut + whole:  # some servers have the counter, and never count a client that left
        return _not_applicable("storm.cut", "scheduler", claim, "the server counted no end of these answers")
    return _finding(
        "storm.cut", "scheduler", works_on(seen), claim,
        f"{cut:.0f} answers were cut off, {whole:.0f} were made to their end for nobody, of {seen.clients} clients",
        f"more than {CUT_SHARE:.0%} cut off, or no more made to their end than for {WHOLE_SHARE:.0%} of the clients: "
        "they leave before three tenths of an answer",
        "Abort a request in the engine when its connection closes.",
    )  # fmt: skip


def _ended(seen: Storm) -> tuple[float, float]:
    """Answers that were cut off, and that were made to their end."""
    return seen.ends.get("abort", 0.0), sum(seen.ends.get(name, 0.0) for name in ("stop", "length"))


def works_on(seen: Storm) -> bool:
    """Whether the server made answers to their end for clients that had left."""
    cut, whole = _ended(seen)
    told = "abort" in seen.ends and seen.exact
    return told and cut <= CUT_SHARE * (cut + whole) and whole > WHOLE_SHARE * seen.clients


def flood(seen: Flood) -> list[Finding]:
    return [
        *([_softened(_finding(
            "malformed.lenient", "server", True, "what servers of other makes take for granted is refused",
            f"{len(seen.lenient)} kinds were taken: {seen.lenient[0]}", "400 to 499",
            "Refuse what cannot be done; what is taken without a word is an answer to another question.", seen.lenient,
        ), True)] if seen.lenient else []),
        _finding(
            "malformed.refused", "server", bool(seen.served), "every malformed request is refused with a 4xx",
            f"{len(seen.served)} kinds of {seen.requests} requests were not"
            + (f": {seen.served[0]}" if seen.served else ""),
            "400 to 499", "A 5xx is a fault of the server; an answer means that something was ignored.", seen.served,
        ),
        _softened(_finding(
            "malformed.told", "server", bool(seen.silent), "every refusal says why, in JSON",
            f"{len(seen.silent)} kinds did not" + (f": {seen.silent[0]}" if seen.silent else ""),
            "an error object", "Say which field is wrong.", seen.silent,
        ), True),
        _finding(
            "malformed.health", "server", bool(seen.sick), "a flood of malformed requests leaves the server healthy",
            seen.sick[0] if seen.sick else f"{seen.probe} 200 throughout", f"{seen.probe} 200 throughout",
            "Reading a request must not hold up the loop that answers probes.", seen.sick,
        ),
    ]  # fmt: skip


def rates_of(levels: Sequence[int], rounds: Sequence[Sequence[Figures]]) -> dict[int, float]:
    """Concurrency -> output tokens a second, the median of all rounds."""
    return {
        number: statistics.median(seen[at].output_tok_s for seen in rounds) for at, number in enumerate(levels)
    }  # fmt: skip


def falls(levels: Sequence[int], rounds: Sequence[Sequence[Figures]]) -> bool:
    """Whether throughput falls off a cliff at the last level."""
    rates = rates_of(levels, rounds)
    return rates[levels[-1]] < CLIFF * max(rates.values()) or max(rates.values()) <= 0


def scale(levels: Sequence[int], rounds: Sequence[Sequence[Figures]], exact: bool = True) -> list[Finding]:
    """rounds: each with the figures of all levels; one that falls is not told before it was measured again. exact: see
    ``Known``; rates of answers of any length do not compare."""
    said = ", ".join(f"{rate:.4g} tok/s at {number}" for number, rate in rates_of(levels, rounds).items())
    said += f", medians of {len(rounds)} rounds" if len(rounds) > 1 else ""
    errors: dict[int, int] = {}
    for seen in rounds:
        for number, one in zip(levels, seen, strict=True):
            if one.errors:
                errors[number] = errors.get(number, 0) + one.errors
    claim = "throughput does not fall off a cliff when more is asked than runs at once"
    why = "the server refuses ignore_eos, so how long an answer gets is the model's to say"
    return [
        _not_applicable("scale.cliff", "scheduler", claim, why) if not exact else _finding(
            "scale.cliff", "scheduler", falls(levels, rounds), claim, said,
            f"{CLIFF:.0%} of the best at {levels[-1]} at once",
            "Requests take room from each other and are computed again: see num_preemptions_total in /metrics.",
        ),
        _finding(
            "scale.answered", "server", bool(errors), "more requests than run at once wait, and are answered",
            ", ".join(f"{count} failed at {number}" for number, count in errors.items()) or "all were",
            "no error below the limit of the queue", "See the server's log; are waiting requests lost?",
        ),
    ]  # fmt: skip


def burst(seen: Burst, room: int | None) -> list[Finding]:
    said = ", ".join(f"{n} x {status or 'no answer'}" for status, n in sorted(seen.statuses.items()))
    said += f" in {seen.seconds:.1f} s"
    open_door = is_open(seen, room)
    return [
        _finding(
            "burst.refused", "server", bool(seen.wrong) or open_door,
            "of a burst, each request is answered or refused with 429; none is left hanging",
            said + (f"; {seen.wrong[0]}" if seen.wrong else ""),
            "200 or 429" + (f", and some 429: there is room for {room}" if room is not None else ""),
            "Refuse what the queue does not hold at once, so that clients can go elsewhere.", seen.wrong,
        ),
        _finding(
            "burst.retry_after", "server", bool(seen.bare), "a refusal says when to come back",
            f"{seen.bare} without Retry-After; {said}", "Retry-After with each 429 and 503", "Send the header.",
        ),
    ]  # fmt: skip


def is_open(seen: Burst, room: int | None) -> bool:
    """Whether nobody was refused though more were there than there is room for."""
    return room is not None and seen.clients > room and not seen.statuses[429]


# --- hurt ------------------------------------------------------------------------------------------------------------

HURT = {
    "frozen.told": "a frozen engine shows in /health",
    "killed.streams": "streams of a killed engine end with an error object",
    "killed.restart": "a killed engine is started again, and answers as before",
    "drain.running": "SIGTERM lets running answers end",
    "restart.same": "a second start becomes ready, and answers as the first",
}


def not_ours(why: str = "the server was not started here, so it is not ours to hurt") -> list[Finding]:
    return [_not_applicable(kind, "server", claim, why) for kind, claim in HURT.items()]


def _over(kind: str) -> Finding:
    return _not_applicable(kind, "server", HURT[kind], "the longest answers there are were over before it happened")


def frozen(seen: Frozen) -> list[Finding]:
    back = "not" if seen.back is None else f"after {seen.back:.1f} s"
    return [
        _finding(
            "frozen.told", "server", seen.seen is None or not seen.well, "a frozen engine shows in /health, as 503",
            "/health was no 200 before" if not seen.well else "not at all" if seen.seen is None
            else f"after {seen.seen:.1f} s", f"{seen.bound:.1f} s",
            "A supervisor would never restart it: health must ask for progress, not for a process.",
        ),
        _finding(
            "frozen.recovers", "server", seen.back is None or not seen.answer.same,
            "when it goes on, the request that waited is answered and /health is 200 again",
            f"well again {back}; answer: {seen.answer.why or 'the same as alone'}", "the answer it gets alone",
            "Being frozen must cost time and nothing else.",
        ),
    ]  # fmt: skip


def killed(seen: Killed, ready_seconds: float) -> list[Finding]:
    told = [one for one in seen.ends if one.ended or one.status == 503]
    whole = [one for one in seen.ends if one.good and seen.asked and one.output_tokens == seen.asked]
    bad = [
        one.error or f"{one.status}, ended as if whole ({one.finish})"
        for one in seen.ends
        if one not in (*told, *whole)
    ]
    sick = "not at all" if seen.sick is None else f"after {seen.sick:.1f} s"
    again = "not ready" if seen.ready is None else f"ready after {seen.ready:.1f} s"
    return [
        _over("killed.streams") if len(whole) == len(seen.ends) else _finding(
            "killed.streams", "server", bool(bad), HURT["killed.streams"],
            f"{len(told)} of {len(seen.ends)} did" + (f"; {bad[0]}" if bad else ""), "an error in each stream",
            "A client must be able to tell half an answer from a whole one.", bad,
        ),
        _finding(
            "killed.health", "server", seen.sick is None, "when the engine is killed, /health turns 503", sick,
            f"{DEATH_SECONDS:g} s", "Watch the process itself, not only its messages.",
        ),
        _finding(
            "killed.restart", "server", seen.ready is None or not seen.answer.same, HURT["killed.restart"],
            f"{again}; {seen.answer.why or 'the same answer'}", f"ready within {ready_seconds:.0f} s, the same answer",
            "See the log: what did the second process lack that the first had?",
        ),
    ]  # fmt: skip


def drained(seen: Drained, seconds: float) -> list[Finding]:
    whole = seen.running.good and seen.running.output_tokens == seen.asked
    closed = next((i for i, status in enumerate(seen.late) if status in (0, 503)), None)
    taken = seen.late[closed or 0 :].count(200)  # before, the signal had not come yet
    how = seen.running.error or f"{seen.running.output_tokens} of {seen.asked} tokens, {seen.running.finish}"
    return [
        _over("drain.running") if whole and not seen.ran else _finding(
            "drain.running", "server", not whole, HURT["drain.running"], how, f"{seen.asked} tokens",
            "Drain before anything is closed.",
        ),
        _finding(
            "drain.refused", "server", closed is None or taken > 0, "behind SIGTERM, new requests are refused",
            f"{taken} of {len(seen.late)} were taken behind the first refusal; statuses {sorted(set(seen.late))}",
            "503, or no connection",
            "Close the door before the answers end, or draining never ends.",
        ),
        _finding(
            "drain.exit", "server", seen.code != 0 or seen.seconds > seconds + 15, "SIGTERM ends it with code 0",
            f"code {seen.code} after {seen.seconds:.1f} s", f"0 within {seconds:g} s and 15 more",
            "A supervisor takes any other code for a crash.",
        ),
    ]  # fmt: skip


def restarted(seen: Sequence[Difference], error: str, seconds: float) -> Finding:
    wrong = [d.why for d in seen if not d.same]
    said = error or f"ready after {seconds:.1f} s; {wrong[0] if wrong else f'{len(seen)} answers are the same'}"
    return _finding(
        "restart.same", "server", bool(error or wrong or not seen), HURT["restart.same"], said, "the same answers",
        "An answer that depends on its process is drawn unseeded, or read from memory nobody wrote.", wrong,
    )  # fmt: skip
