"""Experts in an engine: in 4 bits as decoded, held in part as held whole, whatever the batches and the chunks are."""

from __future__ import annotations

import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dayzero.acceptance.compare import compare_choices, compare_logits, free_bound
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.stack import Forms, Stack
from dayzero.checkpoint.source import LocalSource
from dayzero.decl import Mxfp4
from dayzero.engine import experts as kept_experts
from dayzero.engine.request import SamplingParams
from dayzero.engine.runner import LocalRunner
from dayzero.errors import CheckpointError, UsageError
from dayzero.ops.contract import CONTRACTS
from dayzero.planner.experts import with_expert_inputs
from dayzero.rehearse.twin import TwinOptions, write_twin
from tests.cpu.engine_support import Answer, Engine, ask, prompt_ids

CONFIGS = Path(__file__).parent.parent / "paper" / "configs"
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LENGTHS = (5, 33, 21)
FP8 = {"expert_inputs": "fp8_128"}


@pytest.fixture(scope="module", params=["kimi_k3", "gpt_oss_20b"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MXFP4 packed by expert at a latent width; MXFP4 in stacks, gate and up row by row, with biases."""
    return write(request.param, tmp_path_factory.mktemp(request.param))


def write(name: str, folder: Path, **changes: Any) -> Path:
    shutil.copy(CONFIGS / f"{name}.json", folder / "config.json")
    write_twin(str(folder / "config.json"), str(folder / "twin"), TwinOptions(changes=changes))
    return folder / "twin"


def answers(engine: Engine) -> dict[str, Answer]:
    """Three requests that arrive one after another, in steps of 24 tokens and chunks of 9."""
    requests = [ask(str(n), prompt_ids(n, n), PARAMS) for n in LENGTHS]
    return engine.run(requests, arrive={str(n): i for i, n in enumerate(LENGTHS)})


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(folder, record=True, max_step_tokens=24, max_running=4, chunk_tokens=9, **options)


def assert_same(got: dict[str, Answer], want: dict[str, Answer]) -> None:
    """To the bit: the same operators ran on the same numbers in the same order."""
    for name, answer in want.items():
        assert got[name].tokens == answer.tokens and len(answer.tokens) == PARAMS.max_tokens
        assert all(torch.equal(a, b) for a, b in zip(got[name].logits, answer.logits, strict=True))


def expert_stacks(runner: LocalRunner) -> list[Any]:
    blocks = [layer.channel for layer in runner.stack._layers.values() if hasattr(layer.channel, "weights")]
    return [stack for block in blocks for stack in block.weights]


def test_experts_in_4_bits_equal_decoded_ones_to_the_bit(twin: Path) -> None:
    packed, decoded = engine(twin), engine(twin, forms=Forms())
    assert_same(answers(packed), answers(decoded))
    stacks = expert_stacks(packed.runner)
    assert stacks and all(isinstance(stack, Mxfp4) for stack in stacks)
    assert all(isinstance(stack, Tensor) for stack in expert_stacks(decoded.runner))
    held = sum(stack.nbytes for stack in stacks)
    assert held == sum(prod(stack.shape) * 17 // 32 for stack in stacks), "4 bits each, and 8 for 32 of them"
    assert packed.runner._ready.experts.held_bytes == held
    assert ("experts" in dict(packed.runner.info.table)) and "in 4 bits" in dict(packed.runner.info.table)["experts"]


@pytest.mark.parametrize("variant", ["reference", "torch_cpu"])
def test_any_expert_memory_gives_the_same(twin: Path, variant: str) -> None:
    """Two experts, three, half of them, all."""
    bindings = (("*", "reference"), ("moe.experts", variant))
    want = answers(engine(twin, bindings=bindings))
    first = engine(twin, bindings=bindings, expert_bytes=1 << 30)
    tiers = first.runner._ready.experts.tiers
    one, number = next(iter(tiers.values())).expert_bytes, sum(tier.num_experts for tier in tiers.values())
    assert all(tier.expert_bytes == one for tier in tiers.values())
    read = []
    for held in (2, 3, number // 2, number):
        served = engine(twin, bindings=bindings, expert_bytes=held * one + one // 2)
        assert_same(answers(served), want)
        counters, residency = served.loop.progress().counters, served.runner._ready.experts.residency
        assert residency is not None and residency.most_bytes <= held * one
        assert counters["expert_bytes_read"] % one == 0
        assert counters["expert_bytes_read"] >= one * (counters["expert_misses"] if held < number else 1)
        assert (counters["expert_evictions"] > 0) == (held < number)
        read.append(counters["expert_bytes_read"])
    assert counters["expert_misses"] <= number and counters["expert_hits"] > counters["expert_misses"]
    assert read[0] >= read[2] > read[3] == residency.held_bytes, "the more are held, the fewer are read"
    table = dict(served.runner.info.table)
    assert f"{number:,} of {number:,} experts at once" in table["expert memory"]


def test_decoded_experts_are_swapped_too(tmp_path: Path) -> None:
    twin = write("qwen3_30b_a3b", tmp_path)
    want = answers(engine(twin))
    served = engine(twin, expert_bytes=3 * expert_bytes(twin))
    assert_same(answers(served), want)
    assert served.loop.progress().counters["expert_evictions"] > 0
    assert "decoded" in dict(served.runner.info.table)["experts"]


def expert_bytes(twin: Path) -> int:
    probe = engine(twin, expert_bytes=1 << 30)
    return max(tier.expert_bytes for tier in probe.runner._ready.experts.tiers.values())


@pytest.mark.parametrize("name", ["gpt_oss_20b", "qwen3_30b_a3b"])
def test_an_operator_over_whole_stacks_is_called_for_one_expert_after_another(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, whose operators know nothing of experts that are fetched."""
    twin = write(name, tmp_path)
    want = answers(engine(twin))
    line_of = kept_experts.chosen
    monkeypatch.setattr(
        kept_experts, "chosen", lambda *given: replace(line_of(*given), target="cuda", packed=("mxfp4",))
    )
    asked: list[int] = []
    body = CONTRACTS["moe.experts"].body

    def whole(x: Tensor, ids: Tensor, weights: Tensor, gate: Any, *more: Any, **options: Any) -> Tensor:
        assert len(gate) == 1 and isinstance(gate, Tensor | Mxfp4), "a stack of one, no experts to be fetched"
        asked.append(len(x))
        return body(x, ids, weights, gate, *more, **options)

    apart = kept_experts._apart
    monkeypatch.setattr(
        kept_experts, "_apart",
        lambda bind, sites: apart(lambda contract, site: whole if site in sites else bind(contract, site), sites),
    )  # fmt: skip
    size, fetched, fetch = expert_bytes(twin), [], kept_experts.StoredTier.fetch
    monkeypatch.setattr(
        kept_experts.StoredTier, "fetch", lambda tier, number: fetched.append(number) or fetch(tier, number)
    )
    served = engine(twin, expert_bytes=3 * size)
    tiers = served.runner._ready.experts.tiers.values()
    assert fetched == [0] and len(tiers) > 1, "one expert tells what all that are alike take"
    assert {tier.expert_bytes for tier in tiers} == {size}
    assert_same(answers(served), want)
    assert asked and served.loop.progress().counters["expert_evictions"] > 0


class Away(Tensor):
    """Ids on a device: to bring them over is counted, and nothing else may look at them."""

    brought = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is Tensor.cpu, f"{func} looks at what lies on the device"
        cls.brought += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})).as_subclass(Tensor)


@pytest.mark.parametrize("whole_stacks", [False, True])
def test_the_host_reads_ids_once_a_layer(tmp_path: Path, whole_stacks: bool) -> None:
    twin = write("qwen3_30b_a3b", tmp_path)
    block = next(
        one.channel
        for one in engine(twin, expert_bytes=3 * expert_bytes(twin)).runner.stack._layers.values()
        if hasattr(one.channel, "weights")
    )
    if whole_stacks:
        body = block.experts
        block.experts = kept_experts.one_by_one(
            lambda x, ids, weights, gate, up, down, *more, **options: body(
                x, ids, weights, gate[None], up[None], down[None], *more, **options
            )
        )
    router, generator = block.spec.router, torch.Generator().manual_seed(3)
    x = torch.randn(5, block.spec.latent or block.spec.dim, generator=generator)
    ids = torch.rand(5, router.experts, generator=generator).argsort(1)[:, : router.top_k]
    ids[2] = -1
    weights = torch.rand(5, router.top_k, generator=generator)
    with torch.inference_mode():
        want = block._chosen(x, ids, weights)
        Away.brought = 0
        assert block._chosen(x, ids.as_subclass(Away), weights).equal(want)
    assert Away.brought == 1 and not want[2].any() and want[0].any()


def test_one_expert_is_one_read_where_its_tensors_lie_together(tmp_path: Path) -> None:
    """As in the published files, where the six tensors of an expert lie together."""
    twin = write("kimi_k3", tmp_path)
    tensors = {name: value for shard in twin.glob("*.safetensors") for name, value in load_file(shard).items()}
    for file in [*twin.glob("*.safetensors"), twin / "model.safetensors.index.json"]:
        file.unlink()
    save_file(tensors, twin / "model.safetensors")  # in the order of names within an element type
    served = engine(twin, expert_bytes=1 << 30)
    experts = served.runner._ready.experts
    tier = experts.tiers[max(experts.tiers)]
    source = experts.loader.source
    before_reads, before_bytes = source.num_reads, source.bytes_read
    parts = tier.fetch(3)
    assert source.num_reads - before_reads == 1 and source.bytes_read - before_bytes == tier.expert_bytes
    assert {name: part.shape for name, part in parts.items()} == {
        name: stack.shape[1:] for name, stack in zip(("gate", "up", "down"), expert_stacks(served.runner)[-3:])
    }


# --- errors -----------------------------------------------------------------------------------------------------------


def test_too_little_memory_and_models_without_experts_are_refused(twin: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--expert-memory 100 is too little: two experts of this model take [\d,]+ B"):
        engine(twin, expert_bytes=100)
    with pytest.raises(UsageError, match="has no experts"):
        engine(write("qwen3_8b", tmp_path), expert_bytes=1 << 30)


def test_a_shard_that_vanishes_is_one_error(twin: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(twin, copy)
    served = engine(copy, expert_bytes=2 * expert_bytes(copy))
    for shard in copy.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-\d+.* disappeared while it was being read"):
        served.run([ask("a", prompt_ids(9, 1), PARAMS)])


def test_a_shard_that_became_shorter_is_one_error(twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine(twin, expert_bytes=2 * expert_bytes(twin))
    fetch = LocalSource._fetch
    monkeypatch.setattr(LocalSource, "_fetch", lambda self, file, start, length: fetch(self, file, start, length - 1))
    with pytest.raises(CheckpointError, match="became shorter"):
        served.run([ask("a", prompt_ids(9, 1), PARAMS)])


# --- W4A8 -------------------------------------------------------------------------------------------------------------


def free_run(runner: LocalRunner, tokens: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """(logits [T, V], what was seen by site) of one chunk through the engine's own operators and experts."""
    seen: dict[str, Tensor] = {}
    loaded = runner._ready
    stack = Stack(
        loaded.stack.spec, loaded.experts.load, bind=loaded.experts.bind, tap=lambda s, v: seen.update({s: v.clone()})
    )
    view = LocalCache(loaded.stack.spec, torch.float32).view(tokens)
    return stack.head(stack.forward(view)), seen


def test_w4a8_is_a_plan_choice_with_a_measured_error(twin: Path, record_property: Any) -> None:
    """KL, top-1 by margin and expert sets against W4A16.

    e4m3 keeps 4 significant bits: an input is off by up to 2^-4 of itself, 2^-5.3 in the root mean square, and three
    products see such inputs, so that the experts of the first layer that has them (its input is the same on both sides)
    are off by some 2^-4.5. How far that carries depends on the model: a twin of random weights answers almost evenly
    and turns at a touch. It is reported, and held only to what any model must keep.
    """
    exact, rounded = engine(twin), engine(twin, **FP8)
    tokens = prompt_ids(48, 5)
    (want, wanted), (got, gotten) = free_run(exact.runner, tokens), free_run(rounded.runner, tokens)
    sites = [site for site in wanted if site.endswith(".experts")]
    channel = sites[0].replace("experts", "channel")
    first = float((gotten[channel] - wanted[channel]).norm() / wanted[channel].norm())
    assert 2**-7 < first < 2**-3, "of e4m3's size"
    found = compare_logits(got, want, tokens, free_bound(exact.runner.stack.spec, len(tokens)), len(tokens))
    choices = [compare_choices(gotten[site], wanted[site], causal=False) for site in sites]
    agreement = [round(choice.agreement, 3) for choice in choices]
    for name, value in (("first experts", first), ("KL", found.kl_mean), ("top-1", found.top1), ("sets", agreement)):
        record_property(name, value)
        print(name, value)
    assert choices[0].agreement == 1.0, "the first router sees what it saw"
    assert 0 < found.kl_mean < 1 and sum(count for count, _ in found.top1.values()) == len(tokens)
    missed = sum(choice.missed for choice in choices) / (2 * sum(wanted[site].numel() for site in sites))
    assert missed < 0.5, "most experts are the same"


def test_w4a8_does_not_depend_on_the_form_the_chunks_or_what_is_held(twin: Path) -> None:
    """Reference, widening and ring are one format: a plan that chose it has it for all token counts."""
    contract = "moe.experts_fp8_128"
    forms = {
        name: answers(engine(twin, bindings=(("*", "reference"), (contract, name)), **FP8))
        for name in ("reference", "widen", "ring")
    }
    assert_same(forms["ring"], forms["widen"])
    assert [a.tokens for a in forms["reference"].values()] == [a.tokens for a in forms["widen"].values()]
    swapped = engine(
        twin, bindings=(("*", "reference"), (contract, "ring")), expert_bytes=2 * expert_bytes(twin), **FP8
    )
    assert_same(answers(swapped), forms["ring"])
    whole = Engine(twin, record=True, bindings=(("*", "reference"),), **FP8)
    for n in LENGTHS:
        assert whole.one(prompt_ids(n, n), PARAMS).tokens == forms["reference"][str(n)].tokens


def test_the_ring_is_one_for_all_layers_and_told(twin: Path) -> None:
    served = engine(twin, bindings=(("*", "reference"), ("moe.experts_fp8_128", "ring")), **FP8)
    experts, table = served.runner._ready.experts, dict(served.runner.info.table)
    spec = next(iter(experts.sites.values()))
    assert experts.ring is not None and experts.ring.nbytes < 2 * 3 * spec.inner * spec.width
    assert "expert ring" in table and table["beyond e4m3's reach"].startswith("0 of ")
    before = {part.data_ptr() for part in experts.ring._memory}
    answers(served)
    assert {part.data_ptr() for part in experts.ring._memory} == before and experts.ring.fallbacks == 0


def test_a_ring_for_experts_stored_otherwise_is_refused(tmp_path: Path) -> None:
    twin = write("qwen3_30b_a3b", tmp_path)
    with pytest.raises(UsageError, match="variant 'ring' converts experts in MXFP4, but .* is stored otherwise"):
        engine(twin, bindings=(("moe.experts_fp8_128", "ring"),), **FP8)
    with pytest.raises(UsageError, match="meets no operator"):
        engine(twin, bindings=(("moe.experts", "torch_cpu"),), **FP8)
    spec = engine(twin).runner.stack.spec
    assert with_expert_inputs(spec, "bf16") == spec
