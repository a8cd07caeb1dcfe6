"""The needle grid: how often a needle is found by depth and length, and whether it is lost at a threshold.

A model finds fewer needles the longer the text is; that is its own. An engine loses them where its work changes its
kind: behind a page, a chunk, a window, the rows that a sparse index keeps, the length that rope was trained for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dayzero.acceptance.accept.paired import tail
from dayzero.acceptance.accept.stage import Figure, Profile
from dayzero.acceptance.stages.long_known import Known, Threshold, limit_of
from dayzero.acceptance.stages.long_needle import Found, Haystack, Needle, ask_all
from dayzero.acceptance.stages.long_pace import Pace
from dayzero.finding import Finding

ANSWER_ROOM = 80  # tokens kept free behind a prompt, those of a template included
DOUBT = 0.01  # chance that one test fails an engine that is as good on both sides
TOGETHER = 2.0  # answers for the time of one, at least, where several run
UNKNOWN_LIMIT = 8192  # of a server that does not say how long a prompt may be


@dataclass(frozen=True, slots=True)
class Size:
    """depths x repeats needles a cell row; factor: from one length to the next; pairs: needles at a threshold; bound:
    share that is to be found at every length; workers: asked at once."""

    depths: tuple[float, ...]
    repeats: int
    factor: int
    pairs: int
    bound: float
    workers: int


SIZES: dict[Profile, Size] = {
    "quick": Size((0.1, 0.5, 0.9), 2, 4, 8, 0.6, 4),
    "release-day": Size((0.0, 0.25, 0.5, 0.75, 1.0), 4, 2, 24, 0.8, 8),
    "long": Size(tuple(i / 8 for i in range(9)), 8, 2, 48, 0.9, 8),
}


@dataclass
class Grid:
    """lengths: tried, ascending. left_out: those that the time did not allow. pairs: threshold -> found before and
    behind it, and, where that fell, found at half of it. chat: asked in conversations."""

    size: Size
    lengths: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    pairs: dict[Threshold, tuple[list[Found], list[Found], list[Found]]] = field(default_factory=dict)
    skipped: dict[Threshold, str] = field(default_factory=dict)
    chat: bool = False

    def rate(self, tokens: int, depth: float | None = None) -> float | None:
        kept = [f.right for f in self.found if f.needle.tokens == tokens and depth in (None, f.needle.depth)]
        return sum(kept) / len(kept) if kept else None

    @property
    def able(self) -> bool:
        """Whether the model finds anything at the shortest length."""
        return bool(self.lengths) and bool(self.rate(self.lengths[0]))


def needles_of(size: Size, tokens: int) -> list[Needle]:
    return [Needle(tokens, depth, n) for depth in size.depths for n in range(size.repeats)]


def pairs_of(size: Size, tokens: int) -> list[Needle]:
    """Needles of one length for a paired test: spread over the depths, not at the very ends."""
    return [Needle(tokens, round(0.1 + 0.8 * (i + 0.5) / size.pairs, 4), i) for i in range(size.pairs)]


def lengths_of(known: Known, hay: Haystack, size: Size) -> list[int]:
    """From the shortest that hides a needle to the longest that is admitted."""
    limit = (limit_of(known) or UNKNOWN_LIMIT) - ANSWER_ROOM
    shortest, out = max(hay.least(), min(256, limit // 4)), list[int]()
    while shortest < limit:
        out.append(shortest)
        shortest *= size.factor
    return [*out, limit] if out and limit > 1.2 * out[-1] else out


def run(
    known: Known, hay: Haystack, profile: Profile, at: Sequence[Threshold], pace: Pace, told: Callable[[str], None]
) -> Grid:
    """Fill the grid, then ask around each threshold."""
    grid = Grid(SIZES[profile], chat=known.asker.api == "chat")
    size = grid.size
    for tokens in lengths_of(known, hay, size):
        needles = needles_of(size, tokens)
        if grid.lengths and not pace.affords(*_work(needles, hay)):
            grid.left_out.append(tokens)
            continue
        told(f"{len(needles)} needles in {tokens:,} tokens")
        seen = _asked(known, hay, needles, grid, pace)
        if not grid.lengths and not any(f.right for f in seen) and known.chat and not grid.chat:
            grid.chat = True  # it may want to be asked
            asked = _asked(known, hay, needles, grid, pace)
            grid.chat = any(f.right for f in asked)
            seen = asked if grid.chat else seen
        grid.lengths.append(tokens)
        grid.found += seen
        if not grid.able:
            return grid
    for threshold in at:
        _around(known, hay, threshold, grid, pace, told)
    return grid


def _asked(known: Known, hay: Haystack, needles: Sequence[Needle], grid: Grid, pace: Pace) -> list[Found]:
    return pace.timed(*_work(needles, hay), lambda: ask_all(known.asker, hay, needles, grid.chat, grid.size.workers))


def _work(needles: Sequence[Needle], hay: Haystack) -> tuple[float, float]:
    """Tokens of prompts and of answers; answers that run together share their steps."""
    return sum(needle.tokens for needle in needles), len(needles) * (hay.form.digits + 3) / TOGETHER


def _around(
    known: Known, hay: Haystack, threshold: Threshold, grid: Grid, pace: Pace, told: Callable[[str], None]
) -> None:
    """The same needles just before a threshold and well behind it; where they are lost, also from half of it on."""
    before, limit = threshold.tokens - 1, (limit_of(known) or UNKNOWN_LIMIT) - ANSWER_ROOM
    behind = min(2 * threshold.tokens, limit)
    least = hay.least()
    if before < least or behind <= threshold.tokens:
        grid.skipped[threshold] = f"no needle fits on both sides: prompts have {least} to {limit:,} tokens"
    elif not pace.affords(*(needed := _work([*pairs_of(grid.size, before), *pairs_of(grid.size, behind)], hay))):
        grid.skipped[threshold] = pace.why_not(*needed)
    else:
        told(f"needles around {threshold.name}, {threshold.tokens:,} tokens")
        first = _asked(known, hay, pairs_of(grid.size, before), grid, pace)
        second = _asked(known, hay, pairs_of(grid.size, behind), grid, pace)
        half: list[Found] = []
        if fall(first, second) < DOUBT and threshold.tokens // 2 >= least:
            half = _asked(known, hay, pairs_of(grid.size, threshold.tokens // 2), grid, pace)
        grid.pairs[threshold] = (first, second, half)


def fall(before: Sequence[Found], behind: Sequence[Found]) -> float:
    """Chance of so many needles lost against so few won where both are as likely (McNemar's exact test, one side)."""
    lost = sum(a.right and not b.right for a, b in zip(before, behind, strict=True))
    won = sum(b.right and not a.right for a, b in zip(before, behind, strict=True))
    return tail(lost, lost + won, 0.5, above=True)


def too_few(right: int, count: int, promised: float) -> bool:
    """Whether ``right`` of ``count`` is fewer than chance allows where each is right with ``promised``."""
    return tail(right, count, promised, above=False) < DOUBT


def findings(grid: Grid, hay: Haystack) -> list[Finding]:
    if not grid.lengths:
        why = "no prompt that hides a needle fits into the limit of this server"
        return [Finding("long.needle", "weights", "not applicable", "needles are found", measured=why)]
    failed = [f for f in grid.found if f.error]
    out = [
        Finding(
            "long.needle.answered", "server", "fail" if failed else "pass", "every prompt of the grid is answered",
            measured=f"{len(failed)} of {len(grid.found)} were not" + (f": {failed[0].error}" if failed else ""),
            bound="all", evidence=tuple(f.needle.item for f in failed),
            remedy="See the server's log for these lengths." if failed else "",
        )
    ]  # fmt: skip
    if not grid.able:
        said = next((f.said for f in grid.found if f.said), "")
        return [
            *out,
            Finding(
                "long.needle", "weights", "note", "needles are found",
                measured=f"the model does not retrieve at all: the grid says nothing (it said {said!r})",
                bound=f"one of {len(grid.found)} at {grid.lengths[0]} tokens",
                remedy=f"Expected of a twin; a checkpoint that wants another form of needle says so in {_FILE_SAID}.",
            ),
        ]  # fmt: skip
    out += [_length(grid, hay, tokens) for tokens in grid.lengths]
    out += [_left_out(grid)] if grid.left_out else []
    out += [_threshold(one, *found) for one, found in grid.pairs.items()]
    claim = "needles are not lost at {} ({:,} tokens)"
    return out + [
        Finding("long.needle.threshold", t.layer, "not applicable", claim.format(t.name, t.tokens), measured=why)
        for t, why in grid.skipped.items()
    ]


_FILE_SAID = "dayzero_needle.json"


def _length(grid: Grid, hay: Haystack, tokens: int) -> Finding:
    kept = [f for f in grid.found if f.needle.tokens == tokens]
    right, promised = sum(f.right for f in kept), hay.form.promised
    rate, bound, form = right / len(kept), grid.size.bound, hay.form
    claim = f"needles in {tokens:,} tokens are found"
    missed = tuple(f"{f.needle.item}: {f.said!r}" for f in kept if not f.right)
    said = f"{right} of {len(kept)}" + (", asked in a conversation" if grid.chat else "")
    if promised is not None and tokens <= form.promised_tokens:
        broken = too_few(right, len(kept), promised)
        return Finding(
            "long.needle.promised", "operator", "fail" if broken else "pass", claim, measured=said,
            bound=f"{promised:.0%}, as the checkpoint's own file promises to {form.promised_tokens:,} tokens",
            evidence=missed, remedy="Run `dayzero align` at this length: the weights can do it." if broken else "",
        )  # fmt: skip
    low = rate < bound
    return Finding(
        "long.needle.length", "weights", "note" if low else "pass", claim, measured=said,
        bound=f"{bound:.0%} in this profile; a smooth fall is the model's own, and fails nothing", evidence=missed,
        remedy="Compare with what the publisher claims for this length." if low else "",
    )  # fmt: skip


def _left_out(grid: Grid) -> Finding:
    said = ", ".join(f"{tokens:,}" for tokens in grid.left_out)
    return Finding(
        "long.needle.reach", "hardware", "note", "the grid reaches the limit of the server",
        measured=f"it ends at {grid.lengths[-1]:,} tokens; left out for time: {said}", bound="the longest prompt",
        remedy="Take a longer profile, or a faster machine.",
    )  # fmt: skip


def _threshold(threshold: Threshold, before: list[Found], behind: list[Found], half: list[Found]) -> Finding:
    """A fall at a threshold is the engine's, unless the model falls as much from half of that length on."""
    chance = fall(before, behind)
    own = bool(half) and fall(half, before) < DOUBT
    lost = tuple(b.needle.item for a, b in zip(before, behind, strict=True) if a.right and not b.right)
    fell = chance < DOUBT
    said = f"{sum(f.right for f in before)} of {len(before)} before, {sum(f.right for f in behind)} behind"
    said += f" (chance {chance:.2g})" + (f", {sum(f.right for f in half)} at half of it" if half else "")
    verdict = "pass" if not fell else "note" if own else "fail"
    remedy = {
        "pass": "",
        "note": "The model loses needles from half of that length on as well, so the fall may be its own.",
        "fail": f"Look at what changes at {threshold.name}: run `dayzero align` just behind {threshold.tokens} tokens.",
    }[verdict]
    return Finding(
        "long.needle.threshold", threshold.layer, verdict,  # type: ignore[arg-type]
        f"needles are not lost at {threshold.name} ({threshold.tokens:,} tokens)", measured=said,
        bound=f"McNemar's exact test at {DOUBT:g}: the same needles before and behind", evidence=lost, remedy=remedy,
    )  # fmt: skip


def figure(grid: Grid) -> Figure | None:
    """Share found by depth (rows) and length (columns)."""
    lengths = [*grid.lengths, *grid.left_out]
    if not grid.lengths:
        return None
    depths = grid.size.depths
    values = [[grid.rate(tokens, depth) for tokens in lengths] for depth in depths]
    data = {"rows": [f"{d:.0%}" for d in depths], "columns": [f"{n:,}" for n in lengths], "values": values}
    return Figure("heat", "Needles found", data, x_label="tokens of the prompt", y_label="depth of the needle")


def samples(grid: Grid) -> dict[str, bool]:
    found = [*grid.found, *(f for three in grid.pairs.values() for one in three for f in one)]
    return {f.needle.item: f.right for f in found}
