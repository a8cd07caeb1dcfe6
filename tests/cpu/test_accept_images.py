"""The functional stage on a server that takes images: it passes, and each promise about images can be broken."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bad_server import Call, Fault, bad_server, found_by, judged, kinds

from dayzero.acceptance.accept.service import Servers
from dayzero.acceptance.accept.stage import RunningServer, Subject
from dayzero.acceptance.stages import functional
from dayzero.rehearse.twin import TwinOptions, write_twin

CONFIG = Path(__file__).parents[1] / "paper" / "configs" / "kimi_k3_1.json"


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("images") / "twin"
    write_twin(str(CONFIG), str(folder), TwinOptions(seed=5))
    return Subject(str(folder), serve=("--dtype", "float32", "--threads", "1", "--pool-bytes", "64MiB"))


@pytest.fixture(scope="module")
def good(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Servers(subject, tmp_path_factory.mktemp("servers")) as servers:
        yield servers.shared()


def _parts(call: Call) -> list[list[Any]]:
    """The parts of each message of a request."""
    turns = call.body.get("messages") if isinstance(call.body, dict) else None
    return [turn["content"] for turn in turns or [] if isinstance(turn.get("content"), list)]


def _images(parts: list[Any]) -> list[dict[str, Any]]:
    return [part for part in parts if part["type"] == "image_url"]


def _one_alone(call: Call) -> None:
    """Of several images the first is kept."""
    for parts in _parts(call):
        parts[:] = [part for part in parts if part not in _images(parts)[1:]]


def _all_alike(call: Call) -> None:
    """Every image is the first that was ever sent: what is seen comes from a cache."""
    for parts in _parts(call):
        for part in _images(parts):
            part["image_url"] = FIRST.setdefault("image", part["image_url"])


def _in_one_order(call: Call) -> None:
    """Images fill the placeholders in an order of their own."""
    for parts in _parts(call):
        images = _images(parts)
        for part, url in zip(images, sorted((one["image_url"] for one in images), key=json.dumps), strict=True):
            part["image_url"] = url


def _never_twice(call: Call, status: int, body: Any) -> tuple[int, Any]:
    """A request that comes again is answered otherwise."""
    TIMES[call.raw] += 1
    if TIMES[call.raw] > 1 and isinstance(body, dict):
        for choice in body.get("choices") or []:
            choice["message"]["content"] = "other"
    return status, body


def _refused(call: Call, status: int, body: Any) -> tuple[int, Any]:
    seen = any(_images(parts) for parts in _parts(call))
    return (400, {"error": {"message": "no images"}}) if seen else (status, body)


FIRST: dict[str, Any] = {}
TIMES: Counter[bytes] = Counter()
FAULTS: dict[str, tuple[Fault, str, set[str]]] = {
    "of several images one is kept": (Fault(request=_one_alone), "images", {"images.count"}),
    "all images are one": (Fault(request=_all_alike), "images", {"images.seen", "images.order"}),
    "images in an order of their own": (Fault(request=_in_one_order), "images", {"images.order"}),
    "no image is seen twice alike": (Fault(answer=_never_twice), "images", {"images.repeat"}),
    "images are refused": (Fault(answer=_refused), "images", {"images"}),
}
LAYERS = {
    "of several images one is kept": "tokenizer+template", "all images are one": "operator",
    "images in an order of their own": "operator", "no image is seen twice alike": "cache",
    "images are refused": "operator",
}  # fmt: skip


def test_a_server_that_sees_passes(good: RunningServer, subject: Subject) -> None:
    with bad_server(good, Fault()) as same:
        out = judged(same, subject, functional.checks(), "images")
    assert {f"images.{word}" for word in ("count", "seen", "order", "repeat")} <= kinds(out, "pass"), out.findings
    assert not kinds(out, "fail") | kinds(out, "note") | kinds(out, "not applicable")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_promise_is_found_by_the_finding_that_is_for_it(
    name: str, good: RunningServer, subject: Subject
) -> None:
    fault, check, expected = FAULTS[name]
    FIRST.clear()
    TIMES.clear()
    failed = found_by(fault, check, expected, good, subject, functional.checks())
    assert {finding.layer for finding in failed} == {LAYERS[name]}
