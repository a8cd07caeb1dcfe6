"""Loading for an engine: every stored byte read once, from a folder and from an object store; the originals of packed
weights let go; the same answers in bf16 as from the reference within what bf16 can tell."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
import torch
from tiny_configs import FAMILIES, write_tiny

from dayzero.arch.spec import ModelSpec
from dayzero.blocks.stack import Stack
from dayzero.cache.manager import CacheManager
from dayzero.engine.config import EngineConfig
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.load import Loaded, _pool_slabs, load_model
from dayzero.errors import MachineError, UsageError
from tests.cpu.engine_support import Engine, ask, prompt_ids
from tests.paper.step_driver import layout_of
from tests.paper.store import s3_server, upload

TIED = ("llama_tied",)


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    write_tiny(request.param, out)
    return out


def load(source: str, dtype: str, **config: object) -> tuple[Loaded, list[tuple[float, float]]]:
    told: list[tuple[float, float]] = []
    launch = LaunchSpec(source=source, config=EngineConfig(dtype=dtype, pool_bytes=16 << 20, **config))  # type: ignore[arg-type]
    return load_model(launch, lambda loaded, total: told.append((loaded, total))), told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_byte_is_read_once_and_progress_ends_at_the_total(folder: Path, dtype: str) -> None:
    loaded, told = load(str(folder), dtype)
    stored = sum(entry.nbytes for entry in loaded.model.index.entries.values())
    assert loaded.model.loader.bytes_read == stored
    assert told[-1] == (stored, stored) and told == sorted(told)
    headers = loaded.model.source.bytes_read - stored
    assert 0 < headers < 2_000_000, "config, tokenizer and headers: nothing of the weights twice"


def test_no_original_is_kept_beside_its_packed_form(folder: Path) -> None:
    """Of the parameters, as many bytes stay alive as they have elements: a tied head's second form apart."""
    gc.collect()
    before = {id(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    loaded, _ = load(str(folder), "bfloat16")
    gc.collect()
    held = {
        _place(t): t.numel() * t.itemsize if t.is_mkldnn else t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if isinstance(t, torch.Tensor) and id(t) not in before
    }
    spec = loaded.model.spec
    wanted = sum(decl.numel * (4 if decl.keep == "f32" else 2) for decl in spec.params())
    packed_head = 2 * spec.vocab * spec.dim if spec.tie.tied else 0
    # Panels of packed weights are padded to 32 rows and pairs of columns; the tiny models are mostly padding.
    padding = sum(2 * 33 * (decl.shape[-1] + 1) for decl in spec.params() if len(decl.shape) > 1)
    assert sum(held.values()) <= wanted + packed_head + padding + 2_000_000


def _place(t: torch.Tensor) -> int:
    """Views of one storage are one place; what oneDNN has laid out shows no storage."""
    return id(t) if t.is_mkldnn else t.untyped_storage().data_ptr()


def test_the_fast_operators_are_bound_and_agree_with_the_references(folder: Path) -> None:
    """In bf16 both round at every operator, so only the order of two near tokens may differ: logits, not tokens. Where
    a router's choice between two near experts turned, another function is computed: such tokens are counted."""
    fast, _ = load(str(folder), "bfloat16")
    plain, _ = load(str(folder), "bfloat16", bindings=(("*", "reference"),))
    assert fast.info.facts["bindings"] and not plain.info.facts["bindings"]
    tokens = prompt_ids(40, 3)
    (got, got_ids), (want, want_ids) = (_logits(loaded.stack, tokens) for loaded in (fast, plain))
    turned = torch.zeros(len(tokens), dtype=torch.bool)
    for site, ids in want_ids.items():
        turned |= (ids.sort(-1).values != got_ids[site].sort(-1).values).any(-1)
    assert int(turned.sum()) <= 2
    got, want = got[~turned], want[~turned]
    spread = float(want.std())
    # 2^-8 a rounding, about ten roundings on the way through a layer and four layers, half of them to either side.
    assert float((got - want).abs().max()) < 40 * 2**-8 * spread
    assert float((got - want).norm() / want.norm()) < 10 * 2**-8


def test_an_asked_for_reference_holds_against_what_would_be_chosen(tmp_path: Path) -> None:
    """For a contract, for one site of it, and for a contract but for one site."""
    write_tiny("llama", tmp_path)
    chosen = load(str(tmp_path), "bfloat16")[0].info.facts["bindings"]
    norms = {place for place in chosen if place.startswith("norm.rms@")}
    here = "norm.rms@layers.0.mixer_norm"
    assert here in norms and len(norms) > 1

    def left(*bindings: tuple[str, str]) -> set[str]:
        found = load(str(tmp_path), "bfloat16", bindings=bindings)[0].info.facts["bindings"]
        others = {place: variant for place, variant in chosen.items() if place not in norms}
        assert {place: variant for place, variant in found.items() if place not in norms} == others
        return {place for place in found if place in norms}

    assert left(("norm.rms", "reference")) == set()
    assert left((here, "reference")) == norms - {here}
    assert left(("norm.rms", "reference"), (here, chosen[here])) == {here}
    with pytest.raises(UsageError, match=r"\*=torch_cpu: \* goes with reference alone"):
        left(("*", "torch_cpu"))


def _logits(stack: Stack, tokens: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits [T, V], layer -> chosen experts [T, N])."""
    from dayzero.blocks.local_cache import LocalCache

    seen: dict[str, torch.Tensor] = {}

    def tap(site: str, value: torch.Tensor) -> None:
        if site.endswith(".experts"):
            seen[site] = value.clone()

    tapped = Stack(stack.spec, stack.load, bind=stack.site.bind, prepack=stack.site.prepack, tap=tap)
    view = LocalCache(stack.spec, torch.bfloat16).view(tokens)
    return tapped.head(tapped.forward(view)), seen


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    with s3_server():
        yield


def test_an_engine_reads_from_an_object_store(store: None, tmp_path: Path) -> None:
    write_tiny("kimi_linear", tmp_path)
    where = upload(tmp_path, "released/kimi")
    local, remote = Engine(str(tmp_path)), Engine(where)
    request = [ask("r", prompt_ids(70, 1))]
    assert remote.run(request)["r"].tokens == local.run(request)["r"].tokens
    model = remote.runner._ready.model
    assert model.loader.bytes_read == sum(entry.nbytes for entry in model.index.entries.values())


def test_the_default_pool_takes_half_of_what_may_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be had is the machine's or the container's word, whichever is less (planner/memory)."""
    write_tiny("llama", tmp_path)
    launch = LaunchSpec(source=str(tmp_path), config=EngineConfig(dtype="float32"))
    wide = load_model(launch)
    slab = wide.layout.slab_bytes
    monkeypatch.setattr("dayzero.engine.load.free_bytes", lambda target: 40 * slab)
    assert load_model(launch).num_slabs == 20 < wide.num_slabs


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "mixed"])
def test_a_pool_is_refused_exactly_where_no_request_could_be_served(kind: str) -> None:
    """By the cache's own count, which is also what requests are judged by."""
    layout = layout_of(kind)
    for num_slabs in range(12):
        config = EngineConfig(pool_bytes=max(1, num_slabs * layout.slab_bytes))
        fits = num_slabs > 0 and CacheManager(layout, num_slabs).why_never(2) is None
        if fits:
            assert _pool_slabs(layout, config, cast(ModelSpec, None), free=0) == num_slabs
        else:
            with pytest.raises(MachineError, match="cache pool of .* is too small: give --pool-bytes more"):
                _pool_slabs(layout, config, cast(ModelSpec, None), free=0)
    assert fits


def test_a_context_that_the_model_or_the_pool_cannot_hold_is_refused(tmp_path: Path) -> None:
    """An engine that quietly takes less than it was asked for fails a request later, when nobody looks."""
    write_tiny("llama", tmp_path)

    def start(**options: Any) -> int:
        config = EngineConfig(dtype="float32", **options)
        return load_model(LaunchSpec(source=str(tmp_path), config=config)).info.max_model_len

    trained = start()
    with pytest.raises(UsageError, match=f"trained for {trained} tokens"):
        start(max_model_len=trained + 1)
    small = {"pool_bytes": 1 << 18}
    held = start(**small)
    assert held < trained and start(max_model_len=held, **small) == held
    with pytest.raises(MachineError, match="give --pool-bytes more, or a smaller --max-model-len"):
        start(max_model_len=held + 1, **small)
