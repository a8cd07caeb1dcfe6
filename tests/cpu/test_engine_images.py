"""What images in prompts may not change: cold = warm with two images of one size in both orders, one chunk = any
chunks (boundaries inside an image too), alone = together with text, preempted = not, on reference operators.

The images' sizes are odd grids; two have the same size, so that their prompts are the same ids.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("transformers")
import torch
from small_models import write_small

from dayzero.blocks.local_cache import LocalCache
from dayzero.engine.images import grid_positions
from dayzero.engine.request import Image, NewRequest, SamplingParams
from dayzero.view import Inserted
from tests.cpu.engine_support import Answer, Engine, ask, least_slabs, prompt_ids
from tests.cpu.vision_support import TOWERS, random_pixels

PAGE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SAMPLED = SamplingParams(temperature=5.0, top_p=0.99, seed=11, max_tokens=60, ignore_eos=True)
A, B, C = ((3, 7), 1), ((3, 7), 2), ((5, 4), 3)  # (tokens down, across), seed; A and B have one size


class Model:
    """A twin with a tower, and the answers of an engine without caches to one request at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[bytes, Answer] = {}

    @cached_property
    def lone(self) -> Engine:
        return self.engine(prefix_cache=False, record=True, image_cache_bytes=0)

    def engine(self, **options: object) -> Engine:
        return Engine(self.folder, **{"page_tokens": PAGE, "pool_bytes": 4 << 20, **options})  # type: ignore[arg-type]

    def ask(self, name: str, *parts: object, params: SamplingParams = GREEDY, **more: object) -> NewRequest:
        """A prompt of numbers (so many random ids) and images, one after another."""
        tower = self.lone.runner.stack.spec.vision
        assert tower is not None
        ids: list[int] = []
        media = []
        for number, part in enumerate(parts):
            if isinstance(part, int):
                ids += [i for i in prompt_ids(part, 50 + number) if i != tower.pad_id]
                continue
            (rows, columns), seed = part  # type: ignore[misc]
            pixels = random_pixels(rows * tower.merge, columns * tower.merge, tower.patch, seed).numpy().tobytes()
            key = hashlib.sha256(bytes((rows, columns)) + pixels).digest()
            media.append(Image(key=key, first=len(ids), rows=rows, columns=columns, pixels=pixels))
            ids += [tower.pad_id] * (rows * columns)
        return ask(name, ids, params, media=media, **more)

    def alone(self, request: NewRequest) -> Answer:
        """The greedy answer in one chunk, by itself."""
        lone = msgspec.structs.replace(request, id="one", leader=None, params=GREEDY)
        key = msgspec.msgpack.encode(lone)
        if key not in self._known:
            self._known[key] = self.lone.run([lone])["one"]
        return self._known[key]


@pytest.fixture(scope="module", params=TOWERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_small(request.param, tmp_path_factory.mktemp(request.param)))


def assert_equal(got: Answer, want: Answer, what: object = "") -> None:
    """Same tokens; logits within 1e-5 of their spread, as in test_engine_equalities."""
    assert got.error is None and got.tokens == want.tokens and got.finish == want.finish, what
    assert len(got.logits) == len(got.tokens) == len(want.logits), what
    for i, (one, other) in enumerate(zip(got.logits, want.logits, strict=True)):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.max() - other.min()), (what, i)


def test_an_engine_gives_what_the_blocks_give(model: Model) -> None:
    """Rows of the image in the place of its placeholders, and nothing else: as a plain forward over a cache."""
    request = model.ask("x", 9, A, 6, C, 5)
    stack = model.lone.runner.stack
    view = LocalCache(stack.spec, torch.float32).view(request.prompt)
    tower, inserted = stack.spec.vision, []
    assert tower is not None
    for image in request.media:
        shape = (image.rows * tower.patch * tower.merge, image.columns * tower.patch * tower.merge, 3)
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(shape)
        inserted.append(Inserted(image.first, stack.encode_image(pixels)))
    positions = view.positions
    if tower.place == "grid":
        positions = torch.from_numpy(grid_positions(request.media, 0, len(request.prompt)))
    hidden = stack.forward(replace(view, inserted=tuple(inserted), positions=positions))
    logits = stack.head(hidden[-1:])[0]
    got = model.alone(request)
    assert float((got.logits[0] - logits).abs().max()) <= 1e-5 * float(logits.max() - logits.min())
    blind = model.alone(msgspec.structs.replace(request, media=[]))
    assert float((got.logits[0] - blind.logits[0]).abs().max()) > 1e-2 * float(logits.max() - logits.min())


@pytest.mark.parametrize("run_ahead", [True, False])
def test_any_chunking_gives_the_same(model: Model, run_ahead: bool) -> None:
    """Chunks of 1 and 7 end inside images; one of 64 holds an image, text and a part of the next."""
    request = model.ask("x", 5, A, 3, B, C, 8)
    want = model.alone(request)
    for chunk_tokens in (1, 7, 16, 63, 64, 65):
        engine = model.engine(chunk_tokens=chunk_tokens, prefix_cache=False, record=True, run_ahead=run_ahead)
        assert_equal(engine.run([request])["x"], want, chunk_tokens)
        counters = engine.loop.progress().counters
        assert (counters["mm_queries"], counters["mm_hits"]) == (3, 0), "each is encoded once"


@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_two_images_of_one_size_share_no_cache(model: Model, order: tuple[object, object]) -> None:
    """The ids are the same; what is cached of the one must not answer for the other."""
    engine = model.engine(record=True, run_ahead=False)
    requests = [model.ask(str(i), 20, image, 30) for i, image in enumerate(order)]
    assert requests[0].prompt == requests[1].prompt
    answers = [engine.run([request])[request.id] for request in requests]
    assert answers[0].logits[0].ne(answers[1].logits[0]).any()
    for request, answer in zip(requests, answers, strict=True):
        assert_equal(answer, model.alone(request), request.id)
        assert answer.cached is not None and answer.cached <= PAGE, "no page with a part of the other image"
    for request in requests:
        again = engine.run([request])[request.id]
        assert_equal(again, model.alone(request), request.id)
        assert again.cached == (len(request.prompt) - 1) // PAGE * PAGE


def test_a_warm_prefix_that_ends_inside_an_image(model: Model) -> None:
    """Prompts that share an image and part behind it: the hit may end in its middle, and the rest is encoded again."""
    engine = model.engine(record=True, run_ahead=False, image_cache_bytes=0)
    for before in range(0, PAGE, 3):
        for tail in (2, 11):
            request = model.ask(f"{before}-{tail}", before, A, C, tail)
            assert_equal(engine.run([request])[request.id], model.alone(request), request.id)
    assert engine.loop.progress().counters["prefix_hits"] > 0


def test_images_and_text_together_equal_each_alone(model: Model) -> None:
    engine = model.engine(max_running=6, max_step_tokens=40, prefix_cache=False, record=True)
    requests = [
        model.ask("a", 5, A, 8), model.ask("text", 50), model.ask("b", 5, B, 8), model.ask("two", C, 1, A),
        model.ask("short", 5), model.ask("only", B, 2),
    ]  # fmt: skip
    answers = engine.run(requests, arrive={request.id: i for i, request in enumerate(requests)})
    for request in requests:
        assert_equal(answers[request.id], model.alone(request), request.id)
    counters = engine.loop.progress().counters
    assert (counters["mm_queries"], counters["mm_hits"]) == (5, 2)


def test_the_cache_of_images_keeps_to_its_budget(model: Model) -> None:
    """Room for one image of 21 tokens and not for two: the one used last stays."""
    spec = model.lone.runner.stack.spec
    engine = model.engine(prefix_cache=False, image_cache_bytes=22 * spec.dim * 4)
    for name, image in enumerate((A, A, B, B, A)):
        engine.run([model.ask(str(name), 3, image, 2)])
    counters = engine.loop.progress().counters
    assert (counters["mm_queries"], counters["mm_hits"]) == (5, 2)
    assert engine.runner._images is not None and engine.runner._images.kept_bytes == 21 * spec.dim * 4
    assert not engine.runner._images._slots, "what ended holds no pixels"


def test_preempted_equals_not_preempted(model: Model) -> None:
    wide = model.engine(prefix_cache=False)
    requests = [model.ask(str(i), 5 + i, image, 7, params=SAMPLED) for i, image in enumerate((A, B, C, A))]
    want = {name: answer.tokens for name, answer in wide.run(requests).items()}
    longest = max(len(request.prompt) for request in requests) + SAMPLED.max_tokens
    least, preempted = least_slabs(wide.runner.layout, longest), set()
    for slabs in range(least + 1, 3 * least):
        for run_ahead in {True, False} - preempted:
            engine = model.engine(pool_bytes=slabs * wide.runner.layout.slab_bytes, run_ahead=run_ahead)
            assert {name: answer.tokens for name, answer in engine.run(requests).items()} == want, slabs
            if engine.loop.progress().counters["preemptions"]:
                preempted.add(run_ahead)
        if len(preempted) == 2:
            return
    raise AssertionError("no pool was tight enough to preempt anybody")


def test_aborted_anywhere_leaves_nothing(model: Model) -> None:
    engine = model.engine(chunk_tokens=7, max_running=3)
    before = engine.manager.sums()
    for turn in range(0, 18, 3):
        requests = [model.ask(str(i), 3, image, 9) for i, image in enumerate((A, B, C))]
        answers = engine.run(requests, abort={"0": turn, "1": turn + 2})
        assert answers["2"].tokens == model.alone(requests[2]).tokens
        assert engine.runner._images is not None and not engine.runner._images._slots
    engine.manager.forget()
    assert engine.manager.sums() == before


def test_images_that_do_not_fit_the_prompt_end_their_request_alone(model: Model) -> None:
    engine = model.engine()
    good = model.ask("good", 5, A, 8)
    image = good.media[0]
    wrong = {
        "outside": [msgspec.structs.replace(image, first=30)],
        "short": [msgspec.structs.replace(image, pixels=image.pixels[1:])],
        "twice": [image, image],
    }
    requests = [good, *(msgspec.structs.replace(good, id=name, media=media) for name, media in wrong.items())]
    answers = engine.run(requests)
    assert answers["good"].tokens == model.alone(good).tokens
    for name in wrong:
        assert answers[name].finish == "error" and answers[name].error is not None, name
