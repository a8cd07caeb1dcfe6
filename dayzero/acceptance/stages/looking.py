"""Images: counted in the prompt, seen by the model, told from each other, and kept in their order."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from dayzero.acceptance.stages.answers import CHAT, Refused, Reply
from dayzero.acceptance.stages.asking import Ask, Check, Checks

SIZE = 64  # pixels a side: small, and above what image processors refuse
QUESTION = "What do you see?"
NUM_TOP = 5
# The same request twice differs by rounding alone, another image by what is in it: far below what other colours do to a
# tower, far above what the order of float32 sums does.
UNSEEN = 1e-5
TOWER = "Check that the tower's rows take the placeholders' places, image by image, and that caches know images apart."


def checks() -> tuple[Check, ...]:
    return (Check("images", "images reach the model", _images, "images", layer="operator", apis=CHAT),)


@lru_cache
def png(red: int, green: int, blue: int, size: int = SIZE) -> str:
    """A square with a darker quarter, as a data: URI: what is seen of it hangs on where the quarter lies too."""
    from PIL import Image

    image = Image.new("RGB", (size, size), (red, green, blue))
    image.paste((red // 4, green // 4, blue // 4), (0, 0, size // 2, size // 2))
    data = io.BytesIO()
    image.save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


RED, BLUE = (220, 40, 40), (40, 60, 220)


def _part(colour: tuple[int, int, int]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": png(*colour)}}


def _content(*parts: str | tuple[int, int, int]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one} if isinstance(one, str) else _part(one) for one in parts]


def _look(ask: Ask, *parts: str | tuple[int, int, int]) -> Reply:
    messages = [{"role": "user", "content": _content(*parts)}]
    return ask.whole("chat", messages, temperature=0, max_tokens=2, **ask.scored("chat", NUM_TOP))


def _apart(a: Reply, b: Reply) -> float | None:
    """How far two answers' first log-probabilities lie apart at least; None where none are told."""
    if not a.one.scores or not b.one.scores:
        return None
    one, two = dict(a.one.scores[0].top), dict(b.one.scores[0].top)
    return far_apart(one, two) if one and two else None


def far_apart(one: Mapping[Any, float], two: Mapping[Any, float]) -> float:
    """Largest difference of a token's log-probability that is certain. A token that only one of them lists is, in the
    other, no likelier than the last that is listed there."""
    shared = [abs(one[key] - two[key]) for key in one if key in two]
    least = {id(one): min(one.values()), id(two): min(two.values())}
    alone = [
        value - least[id(other)] for own, other in ((one, two), (two, one)) for key, value in own.items()
        if key not in other
    ]  # fmt: skip
    return max([*shared, *alone, 0.0])


def _images(ask: Ask, out: Checks) -> None:
    bare = ask.whole("chat", [{"role": "user", "content": _content(QUESTION)}], temperature=0, max_tokens=1)
    try:
        red = _look(ask, RED, QUESTION)
    except Refused as error:
        if ask.promises("images"):
            raise
        out.skip("images", "images reach the model", f"refused with {error}", "operator")
        return
    layouts = {
        "alone": _look(ask, RED),
        "behind the text": _look(ask, QUESTION, RED),
        "two": _look(ask, RED, QUESTION, BLUE),
        "two the other way round": _look(ask, BLUE, QUESTION, RED),
    }
    one = red.used.prompt - bare.used.prompt
    two = layouts["two"].used.prompt - bare.used.prompt
    # markers around an image may be shared, so two are not held to be exactly twice one
    out.judge(
        "images.count", "each image adds its tokens to the prompt", one > 0 and abs(two - 2 * one) <= 2,
        f"one {one}, two {two}", "more than 0, and twice that within 2", layer="tokenizer+template",
        remedy="Write as many placeholders as the tower makes rows, for each image.",
    )  # fmt: skip
    again, blue = _look(ask, RED, QUESTION), _look(ask, BLUE, QUESTION)
    apart = {
        "the same again": _apart(red, again), "another": _apart(red, blue),
        "another order": _apart(layouts["two"], layouts["two the other way round"]),
    }  # fmt: skip
    if None in apart.values():
        out.skip(
            "images.seen", "another image gives other log-probabilities", "it states no log-probabilities", "operator"
        )
        return
    told = {name: far or 0.0 for name, far in apart.items()}
    shown = {name: f"{far:.2e} nat" for name, far in told.items()}
    floor = max(UNSEEN, 2 * told["the same again"])
    for name, claim in (
        ("another", "another image of the same size"),
        ("another order", "two images in another order"),
    ):
        out.judge(
            f"images.{'seen' if name == 'another' else 'order'}", f"{claim} gives other log-probabilities",
            told[name] > floor, shown, f"more than {floor:.1e} nat, twice the same request's noise", layer="operator",
            remedy=TOWER,
        )  # fmt: skip
    out.judge(
        "images.repeat", "the same image gives the same answer again", red.one.said == again.one.said,
        shown["the same again"], "equal", layer="cache", remedy=TOWER,
    )  # fmt: skip
