"""The rehearsal model's trainer: its arithmetic against the published form, its files against our readers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import dayzero
from dayzero.chat.conversation import Conversation, ImagePart, Message, TextPart
from dayzero.chat.images import make_picture
from dayzero.chat.tiktoken_form import TiktokenTokenizer, read_vocabulary
from dayzero.chat.xtml import XtmlEncoding
from dayzero.checkpoint.source import open_source
from dayzero.models.blueprint import blueprint, read_config, require_recipe

ORACLES = Path(dayzero.__file__).parent / "oracles"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rehearsal"
TEXT = "In the beginning was the Word, and the Word was with God. It's not so; they'd say: WHY? " * 40
F32_SUMS = 2.0**-24 * 256  # the oracle's float32 sums and products through all layers, relative to the largest value


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """The example's files are scripts beside each other, as the oracle's are."""
    before = sys.path[:]
    sys.path[:0] = [str(EXAMPLE), str(ORACLES)]
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def data(here: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of a few sentences, in the form that corpus.py writes."""
    import bpe
    import phrases

    folder = tmp_path_factory.mktemp("data")
    encoder = bpe.Encoder(bpe.learn(TEXT + phrases.vocabulary_text(), 1000))
    # The model's vocabulary has a fixed size: what so short a text does not fill stands for nothing.
    encoder = bpe.Encoder(
        [*encoder.tokens, *(b"\xff\xfe" + bytes(divmod(i, 256)) for i in range(1792 - len(encoder.tokens)))]
    )
    bpe.write(folder, encoder)
    ids = np.array(encoder.encode(TEXT), np.uint16)
    np.savez(folder / "text.npz", train=np.resize(ids, 6000), held_out=np.resize(ids, 3000))
    return folder


@pytest.fixture(scope="module")
def small(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A small model with no parameter left at a value that hides it, and an index that picks less than there is."""
    import export
    import model
    import sizes

    config = copy.deepcopy(sizes.SMALL)
    config["text_config"]["dsa_config"]["top_k"] = 16
    masters = model.initial(config, 0)
    draw = torch.Generator().manual_seed(1)
    for value in masters.values():
        value += 0.1 * torch.randn(value.shape, generator=draw)
    folder = tmp_path_factory.mktemp("small") / "model"
    export.write(folder, masters, config, data)
    return folder, config


# --- delta attention ----------------------------------------------------------------------------------------------


def delta_inputs(num_tokens: int, size: int, near: bool) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(num_tokens)
    q, k, v, z = (torch.randn(num_tokens, 2, size, generator=draw, dtype=torch.float64) for _ in range(4))
    k = k * 0.05 + 1 if near else k  # keys that repeat: what makes the inverse large where it is not done in blocks
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -5 * torch.sigmoid(4 * z - (5 if near else 0))
    beta = torch.sigmoid(3 * torch.randn(num_tokens, 2, generator=draw, dtype=torch.float64))
    return [q * size**-0.5, k, v, g, beta]


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-4)])
def test_chunks_are_the_recurrence(near: bool, dtype: torch.dtype, bound: float) -> None:
    import kda

    given = delta_inputs(5 * 64, 16, near)
    first = torch.tensor([True, False, False, True, False])
    found = kda.chunked(*(x.to(dtype) for x in given), first)
    expected = torch.cat([kda.recurrence(*(x[a:b] for x in given)) for a, b in ((0, 192), (192, 320))])
    assert float((found - expected).abs().max() / expected.abs().max()) < bound


@pytest.mark.parametrize(("dtype", "strong", "bound"), [(torch.float64, False, 1e-10), (torch.float32, True, 1e-4)])
def test_gradients_of_chunks_are_those_of_the_recurrence(dtype: torch.dtype, strong: bool, bound: float) -> None:
    """Decays at their lower limit bring exponents to what float32 just holds: nothing may be infinite on the way."""
    import kda

    given = delta_inputs(3 * 64, 4, False)
    given[3] = torch.full_like(given[3], -4.99) if strong else given[3]
    mine = [x.to(dtype).requires_grad_() for x in given]
    first = torch.tensor([True, False, True])
    found = torch.autograd.grad(kda.chunked(*mine, first).sin().sum(), mine)
    given = [x.requires_grad_() for x in given]
    pieces = [kda.recurrence(*(x[a:b] for x in given)) for a, b in ((0, 128), (128, 192))]
    expected = torch.autograd.grad(torch.cat(pieces).sin().sum(), given)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) < bound * float(other.abs().max())


def test_gradient_of_the_inverse() -> None:
    import kda

    below = torch.randn(2, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: kda.inverse(a.tril(-1)), (below,))


# --- MXFP4 --------------------------------------------------------------------------------------------------------


def test_packing_keeps_what_rounding_keeps() -> None:
    import mxfp4
    from kimi_k3 import decode_mxfp4

    matrix = torch.randn(24, 96, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 3, 24)[:, None]
    matrix[3] = 0
    codes, scales = mxfp4.packed(matrix)
    held = decode_mxfp4(codes, scales)
    assert torch.equal(held, mxfp4.unpacked(codes, scales))
    assert torch.equal(held, mxfp4.rounded(matrix))
    assert torch.equal(mxfp4.rounded(held), held), "what has been rounded stays"
    groups, kept = matrix.unflatten(1, (-1, 32)), held.unflatten(1, (-1, 32))
    # At most 1 off where the group's largest number is 5 at least, 0.5 where that is 3 at least.
    assert float(((groups - kept).abs() / groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)).max()) <= 0.2
    given = matrix.clone().requires_grad_()
    mxfp4.rounded(given).sum().backward()
    assert given.grad is not None and bool((given.grad == 1).all())


# --- the forward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_forward_is_the_plain_forward(small: tuple[Path, dict[str, Any]], dtype: torch.dtype) -> None:
    import export
    import images
    import kimi_k3
    import model
    from run_plain import Watched

    folder, config = small
    masters = export.masters_of(load_file(folder / "model.safetensors"), config)
    ids = torch.randint(0, 1000, (2, 128), generator=torch.Generator().manual_seed(3))
    ids[0, 10:46] = config["media_placeholder_token_id"]
    pixels = torch.from_numpy(images.draw(np.random.default_rng(0)).pixels)
    none = torch.zeros(2, 1, dtype=torch.long)
    batch = model.Batch(ids, ids, none.float(), none, none, pixels[None], torch.arange(10, 46)[None])
    weights = {n: v.to(dtype) for n, v in model.working({n: v.to(dtype) for n, v in masters.items()}, dtype).items()}

    def logits(sparse: bool) -> torch.Tensor:
        with torch.no_grad():
            h = model.hidden(weights, config, batch, model.Run(dtype, sparse=sparse))
        return (h @ weights["lm_head.weight"].T).unflatten(0, (2, 128))

    dense = copy.deepcopy(config)
    dense["text_config"]["dsa_config"]["top_k"] = 128
    for sparse, settings in ((True, config), (False, dense)):
        found = logits(sparse)
        for number, shown in ((0, [pixels]), (1, [])):
            expected = kimi_k3.forward(Watched(folder), settings, ids[number].tolist(), lambda *a: None, shown)
            assert float((found[number] - expected).abs().max() / expected.abs().max()) < F32_SUMS
    assert float((logits(True) - logits(False)).abs().max()) > 0.1, "the index leaves something out"


def test_folder_is_the_family_s_with_nothing_left_over(small: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    import export
    import model
    import sizes

    folder, _ = small
    source = open_source(str(folder))
    config = read_config(source)
    recipe = require_recipe(config, None)
    assert recipe.name == "kimi_k3"
    plan = blueprint(config, recipe)
    assert plan.spec.stop_ids == (sizes.EOS,)
    full = model.initial(sizes.CONFIG, 0)
    assert 5e6 < sum(value.numel() for value in full.values()) < 7e6
    stored = export.tensors(full, 64)
    assert sum(value.numel() * value.element_size() for value in stored.values()) < 16e6
    back = export.masters_of(stored, sizes.CONFIG)
    assert back.keys() == full.keys()
    held = model.working(full, torch.bfloat16)
    assert all(torch.equal(back[name], held[name].float()) for name in full), "trained on what is written"


# --- tokens -------------------------------------------------------------------------------------------------------


def test_ids_are_the_service_s(small: tuple[Path, dict[str, Any]]) -> None:
    import bpe
    import chat
    import phrases

    folder, _ = small
    encoder = bpe.read(folder / "tiktoken.model")
    tokenizer = TiktokenTokenizer(read_vocabulary(open_source(str(folder))))
    for text in (
        TEXT[:900],
        phrases.vocabulary_text()[:3000],
        " of Zoe is 12345.",
        "a\n\n b  c\n",
        "I'LL d'o it's 7x9",
    ):
        assert encoder.encode(text) == tokenizer.encode(text)
        assert encoder.decode(encoder.encode(text)) == text
    encoding = XtmlEncoding(tokenizer)
    picture = make_picture(Image.new("RGB", (96, 96)), rule_of_the_model())
    asked = Message("user", (ImagePart("", image=picture), TextPart("What do you see?")))
    for thinking in (True, False):
        out = chat.Writer(encoder)
        out.open_user()
        out.image(96, 96, picture.tokens)
        out.say("What do you see?")
        out.close_user()
        first = Conversation([asked], template_kwargs={"thinking": thinking})
        out.generation(thinking)
        assert out.ids == list(encoding.prompt(first).ids)
        whole = chat.Writer(encoder)
        whole.add(out.ids[: -len(generation(encoder, thinking))])
        whole.answer("It is 12345.", thinking, 1.0, ("12345", 5.0))
        whole.open_user()
        thought = phrases.THOUGHT if thinking else None
        told = [asked, Message.of("assistant", "It is 12345.", reasoning=thought), Message.of("user", "")]
        again = encoding.prompt(Conversation(told, template_kwargs={"thinking": thinking}, add_generation_prompt=False))
        assert list(again.ids)[: len(whole.ids)] == whole.ids
        assert [i for i, w in zip(whole.ids, whole.weights, strict=True) if w == 5.0] == encoder.encode("12345")


def generation(encoder: Any, thinking: bool) -> list[int]:
    import chat

    out = chat.Writer(encoder)
    out.generation(thinking)
    return out.ids


def rule_of_the_model() -> Any:
    from dayzero.arch.pixels import FitAndPad

    return FitAndPad(patch=8, merge=2, max_patches=65536, max_side_patches=512)


# --- training -----------------------------------------------------------------------------------------------------


def make(plan: Any) -> Any:
    import model
    import sizes
    import train

    return train.make_trainer(plan, 3e-3, model.Run(torch.float32), sizes.SMALL, torch.device("cpu"))


def test_resumed_is_not_interrupted(data: Path, tmp_path: Path) -> None:
    import state
    from data import Plan, Steps

    plan = Plan(tokens=512, dense_steps=3, sparse_steps=3, longest=128)
    steps = Steps(data, plan)

    def learn(trainer: Any, until: int) -> None:
        while trainer.step < until:
            trainer.learn(steps[trainer.step])

    whole = make(plan)
    learn(whole, 2)
    state.save(tmp_path, state.of(whole.step, whole.config, whole.masters, whole.optimizer))
    assert all(file.stat().st_size < 16 << 20 for file in tmp_path.iterdir())
    learn(whole, 5)
    resumed = make(plan)
    resumed.step = state.resume(state.load(tmp_path), resumed.masters, resumed.optimizer)
    assert resumed.step == 2
    learn(resumed, 5)
    for name, value in whole.masters.items():
        assert torch.equal(value, resumed.masters[name]), name


def test_learning_lowers_what_a_batch_costs(data: Path) -> None:
    """The same batches over and over: every kind of task gets cheaper, and so does what the index is told."""
    from data import Plan, Steps

    plan = Plan(tokens=512, dense_steps=400, sparse_steps=0, longest=128)
    steps = Steps(data, plan)
    batches = [steps[number] for number in range(6)]
    assert {batch.pixels is None for batch in batches} == {True, False}
    trainer = make(plan)
    costs = []
    for _ in range(4):
        told = [trainer.learn(batch) for batch in batches]
        sums = torch.stack([one["sums"] for one in told]).sum(0)
        costs.append(
            (sums[1:, 1] / sums[1:, 0].clamp_min(1), float(torch.stack([one["index"] for one in told]).mean()))
        )
    assert bool((costs[-1][0] < costs[0][0]).all()), costs
    assert costs[-1][1] < costs[0][1]
    untouched = [n for n, v in trainer.masters.items() if v.requires_grad and v not in trainer.optimizer.state]
    assert not untouched, "every parameter is learnt"


def test_bfloat16_computes_the_same_but_for_rounding(data: Path) -> None:
    """As on a GPU: matrices in bfloat16, dense and sparse, text and pictures."""
    import train
    from data import Plan, Steps
    from model import Run

    plan = Plan(tokens=512, dense_steps=8, sparse_steps=8, longest=128)
    steps = Steps(data, plan)
    numbers = [next(n for n in range(8) if (steps[n].pixels is None) == text) for text in (True, False)]
    for number, sparse in ((numbers[0], False), (numbers[1], False), (numbers[0], True)):
        costs = []
        for dtype in (torch.float32, torch.bfloat16):
            trainer = make(plan)
            trainer.run, trainer.step = Run(dtype), plan.dense_steps if sparse else 0
            told = trainer.learn(steps[number])
            costs.append(float(told["sums"][:, 1].sum() / told["sums"][:, 0].sum()))
            assert bool(torch.isfinite(told["norm"]))
        # Logits of an untrained model are of order 1; bfloat16 keeps 8 bits of each number on the way to them.
        assert abs(costs[0] - costs[1]) < 2.0**-6 * costs[0]
    assert train.factor(0, 4000) < train.factor(1999, 4000) == 1.0
    assert 0 < train.factor(3990, 4000) < 0.01


def test_the_tower_alone_learns_what_stands_where(monkeypatch: pytest.MonkeyPatch) -> None:
    import look
    from data import Plan

    shown = look.Pictures(16)[3]
    areas = shown["pixels"].reshape(16, 6, 16, 6, 16, 3).astype(float)
    spread = areas.std((2, 4)).sum(-1).reshape(16, 36)  # of the colours under each of the 36 tokens
    own = look.cells_of(36)
    by_cell = np.stack([spread[:, own.numpy() == cell].max(1) for cell in range(9)], 1)
    for found, wanted in zip(by_cell, shown["cell"], strict=True):
        assert found[wanted > 0].min() > found[wanted == 0].max(), "shapes have edges, paper has none"
        assert len(set(wanted[wanted > 0])) == 1
    assert ((shown["cell"] > 0).sum(1) == shown["count"][:, 0] + 1).all()

    trainer = make(Plan(tokens=512, dense_steps=8, sparse_steps=0, longest=128))
    before = {name: value.detach().clone() for name, value in trainer.masters.items()}
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(look, "LOG_EVERY", 1)
    monkeypatch.setattr(look, "until", lambda *_: [(0.0, look.Pictures(16)[0])] * 12)
    look.teach(trainer.masters, trainer.config, trainer.run, 1.0, 0, lines.append, 16)
    for name in look.ASKED:
        assert lines[-1][name]["loss"] < lines[0][name]["loss"], name
    same = {name for name, value in trainer.masters.items() if torch.equal(value, before[name])}
    assert same == {name for name in before if not name.startswith(look.PARTS)}
