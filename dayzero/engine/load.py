"""From a LaunchSpec to a model in memory: recipe, weights, bindings, cache layout, and what callers are told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from dayzero.arch.record_choice import records_text, with_records
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.open import LoadedModel, open_model
from dayzero.blocks.site import Bind, prepacker
from dayzero.blocks.stack import Load, Stack
from dayzero.cache.layout import Dtype, Layout, lay_out
from dayzero.cache.manager import CacheManager
from dayzero.checkpoint.seeded_source import SEEDED
from dayzero.decl import Form, Fp8Blocks, Mxfp4
from dayzero.engine.api import EngineInfo
from dayzero.engine.buckets import RecordingPlan, host_sites, plan_recording
from dayzero.engine.choose import DRAW
from dayzero.engine.choose import USES as SAMPLING
from dayzero.engine.config import EngineConfig
from dayzero.engine.experts import KeptExperts, keep_experts, stored_forms
from dayzero.engine.launch import LaunchSpec, LoadProgress
from dayzero.engine.media import image_info
from dayzero.engine.recorded import reserved_bytes
from dayzero.engine.seeded import open_seeded, seeded_rows
from dayzero.errors import MachineError
from dayzero.ops.bind import load_entry_points
from dayzero.ops.bindings import chosen
from dayzero.planner.bindings import decide
from dayzero.planner.detect import Kind, detect, free_bytes
from dayzero.planner.experts import with_expert_inputs
from dayzero.planner.image_processor import read_pixel_rule
from dayzero.planner.kept import linear_form
from dayzero.planner.linear_inputs import with_linear_inputs
from dayzero.planner.packed_linears import linear_lines
from dayzero.planner.tokenizer_files import TokenizerFiles, read_tokenizer_files
from dayzero.planner.variants import binding_rows
from dayzero.units import bytes_text, counted

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ELEMENTS: Mapping[torch.dtype, Dtype] = {torch.float32: "f32", torch.bfloat16: "bf16"}
POOL_SHARE = 0.5  # of the memory that is free behind the weights
DEVICE_POOL_SHARE = 0.9  # of an accelerator, which nobody else uses; the rest is for what a step holds
MOST_POOL_BYTES = 8 << 30  # unless the caller asks for more
UNBOUNDED_TOKENS = 1 << 40
LEAST_TOKENS = 2  # one of a prompt, one of an answer

Watch = Callable[[ModelSpec, Bind], Bind]  # operators as they are to be called, from operators as they are bound


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run. device: ``cpu`` or ``cuda``. recording: how its steps are recorded, and graph_bytes: what
    was left for that beside the pool. draws_on_device: whether tokens are drawn without asking the host."""

    device: str
    model: LoadedModel
    stack: Stack
    layout: Layout
    num_slabs: int
    info: EngineInfo
    experts: KeptExperts
    recording: RecordingPlan
    graph_bytes: int
    draws_on_device: bool


def load_model(launch: LaunchSpec, progress: LoadProgress | None = None, watch: Watch | None = None) -> Loaded:
    """Read every parameter once, bound to the operators the plan chose. Errors: those of ``open_model``; UsageError
    for bindings; MachineError when weights or one sequence do not fit into memory."""
    config = launch.config
    catalog, _ = load_entry_points()
    hardware, _ = detect(cast(Kind, launch.device))
    model, images = _with_images(_opened(launch, hardware.target))
    spec = with_records(with_expert_inputs(model.spec, config.expert_inputs), config.cache)
    model = replace(model, spec=with_linear_inputs(spec, config.linear_inputs, _forms(model)))
    dtype = model.loader.dtype
    uses = (*model.spec.contracts(), *SAMPLING)
    bindings = decide(uses, hardware, ELEMENTS[dtype], dict(config.bindings), catalog)
    experts = keep_experts(model, bindings, catalog, config.expert_bytes)
    linears = stored_forms(model.loader, linear_lines(uses, bindings, catalog))
    experts.packed = {**experts.packed, **linears}
    load = partial(_placed, experts.load, hardware.target)
    bind = experts.bind if watch is None else watch(model.spec, experts.bind)
    stack = Stack(model.spec, load, bind=bind, prepack=experts.prepack(prepacker(bindings, catalog)))
    total = float(experts.bytes_to_load(model.index.total_bytes))
    for _ in stack.load_all():
        if progress is not None:
            progress(float(model.loader.bytes_read), total)
    layout = lay_out(model.spec.cache(), dtype=ELEMENTS[dtype], page_tokens=config.page_tokens)
    cut = experts.sites if experts.residency is not None else ()
    recording = plan_recording(config, hardware.target, host_sites(model.spec, uses, bindings, catalog, cut))
    recording = replace(recording, in_pieces=bool(cut))
    drawer = chosen(DRAW.contract, DRAW.site, bindings, catalog)
    draws = hardware.target != "cpu" and drawer.graph and (not drawer.most or model.spec.vocab <= drawer.most)
    graph_bytes = reserved_bytes(stack, layout, config, recording, hardware.target)
    free = max(0, free_bytes(hardware.target) - experts.bytes_to_come - graph_bytes)
    num_slabs = _pool_slabs(layout, config, model.spec, free, hardware.target)
    info = _info(launch, model, layout, num_slabs, bindings, experts)
    rows = [info.table[0], ("device", hardware.name), *info.table[1:], *_linear_rows(linears, config)]
    info = msgspec.structs.replace(info, table=rows)
    if images is not None and model.spec.vision is not None:
        table = [*info.table, ("images", images)]
        info = msgspec.structs.replace(info, images=image_info(model.spec.vision), table=table)
    return Loaded(hardware.target, model, stack, layout, num_slabs, info, experts, recording, graph_bytes, draws)


def _forms(model: LoadedModel) -> dict[str, Form]:
    """Form, by name, of the parameters that can stay as they are stored."""
    found = {name: model.loader.packs(name) for name in model.loader.names()}
    return {name: form for name, form in found.items() if form is not None}


def _opened(launch: LaunchSpec, device: str) -> LoadedModel:
    """The model of the launch's source; where its weights are made, on ``device``."""
    dtype = DTYPES.get(launch.config.dtype)
    if launch.source.startswith(SEEDED):
        return open_seeded(launch.source, recipe=launch.recipe, dtype=dtype, device=device)
    model = open_model(launch.source, recipe=launch.recipe, dtype=dtype)
    model.loader.place(device)
    return model


def _with_images(model: LoadedModel) -> tuple[LoadedModel, str | None]:
    """The model with the checkpoint's own numbers for images, and where they come from; None without a tower."""
    tower = model.spec.vision
    if tower is None:
        return model, None
    rule, why = read_pixel_rule(model.source, tower)
    return replace(model, spec=replace(model.spec, vision=replace(tower, pixels=rule))), why


def _placed(load: Load, device: str, prefix: str) -> dict[str, Tensor]:
    """What ``load`` gives, on the device. Experts that are fetched when they are chosen stay where they are."""
    values: dict[str, Any] = dict(load(prefix))
    for name, value in values.items():
        if isinstance(value, Mxfp4 | Fp8Blocks):
            values[name] = type(value)(value.codes.to(device), value.scales.to(device))
        elif isinstance(value, Tensor):
            values[name] = value.to(device)
    return values


def _pool_slabs(layout: Layout, config: EngineConfig, spec: ModelSpec, free: int, target: str = "cpu") -> int:
    """Slabs of the pool: as many bytes as asked for; else a share of what is free, up to what can ever be used.

    free: bytes of the device that are neither used nor promised.

    MachineError when not even the shortest sequence fits.
    """
    if config.pool_bytes is not None:
        size = config.pool_bytes
    else:
        longest = config.context(spec.max_positions)
        full = config.max_running * (longest * layout.token_bytes + layout.window_bytes + 2 * layout.state_footprint)
        share, most = (POOL_SHARE, MOST_POOL_BYTES) if target == "cpu" else (DEVICE_POOL_SHARE, free)
        size = min(int(share * free), most, max(full, 64 * layout.slab_bytes))
    num_slabs = size // layout.slab_bytes
    why: str | None = f"One slab takes {bytes_text(layout.slab_bytes)}."
    if num_slabs:
        why = CacheManager(layout, num_slabs).why_never(LEAST_TOKENS)
    if why is not None:
        raise MachineError(
            f"The cache pool of {bytes_text(size)} is too small: give --pool-bytes more, or free memory. {why}"
        )
    return num_slabs


def _info(
    launch: LaunchSpec, model: LoadedModel, layout: Layout, num_slabs: int, bindings: Mapping[str, str],
    experts: KeptExperts,
) -> EngineInfo:  # fmt: skip
    config, spec, dtype = launch.config, model.spec, ELEMENTS[model.loader.dtype]
    files = read_tokenizer_files(model.source, model.config)
    stops = ending_ids(launch, files, spec.vocab)
    pool_tokens = _pool_tokens(layout, num_slabs)
    longest = min(config.context(spec.max_positions), pool_tokens)
    if config.max_model_len is not None and longest < config.max_model_len:
        raise MachineError(
            f"The cache pool holds {pool_tokens:,} tokens of one sequence, not the {config.max_model_len:,} that were "
            "asked for: give --pool-bytes more, or a smaller --max-model-len."
        )
    pool = f"{bytes_text(num_slabs * layout.slab_bytes)}, {pool_tokens:,} tokens of one sequence"
    table = [
        ("model", f"{spec.family}, {len(spec.layers)} layers, {dtype}"),
        ("weights", bytes_text(model.loader.bytes_read)),
        *seeded_rows(model),
        *experts.rows(),
        *binding_rows(bindings, (*spec.contracts(), *SAMPLING)),
        ("pool", pool),
        *layout.lines(),
        ("longest context", f"{longest:,} tokens"),
        ("concurrency", f"{config.max_running} requests, {config.max_step_tokens:,} tokens a step"),
        ("prefix cache", _prefix_row(layout, config)),
        ("stop ids", ", ".join(f"{i} ({'; '.join(files.stop.get(i, ['chat format']))})" for i in stops) or "none"),
    ]
    defaults = {key: value for key, value in files.sampling.items() if value is not None} | launch.defaults
    return EngineInfo(
        source=launch.source, family=spec.family, dtype=dtype, max_model_len=longest, vocab=spec.vocab, stop_ids=stops,
        defaults=defaults, table=table, page_tokens=layout.page_tokens, pool_tokens=pool_tokens,
        max_running=config.max_running, facts={
            "bindings": dict(bindings), "bytes_read": model.loader.bytes_read, "expert_inputs": config.expert_inputs,
            "linear_inputs": config.linear_inputs, "cache_records": records_text(spec),
            "token_bytes": layout.token_bytes,
        },
    )  # fmt: skip


def _linear_rows(kept: Mapping[str, Form], config: EngineConfig) -> list[tuple[str, str]]:
    """Of the start table: linear layers whose weights stay as they are stored."""
    told = linear_form(kept.values(), config.linear_inputs)
    return [("linear layers", told)] if told else []


def ending_ids(launch: LaunchSpec, files: TokenizerFiles, vocab: int) -> list[int]:
    """Ids that end an answer: what the chat side found, else what the files state."""
    return sorted(i for i in (set(launch.stop_ids) or set(files.stop)) if 0 <= i < vocab)


def _pool_tokens(layout: Layout, num_slabs: int) -> int:
    """Longest single sequence that the pool admits, in tokens; a number beyond all contexts where windows bound it."""
    manager = CacheManager(layout, num_slabs)
    low, high = 0, UNBOUNDED_TOKENS + 1
    while high - low > 1:  # admitted, not admitted
        middle = (low + high) // 2
        low, high = (middle, high) if manager.why_never(middle) is None else (low, middle)
    return low


def _prefix_row(layout: Layout, config: EngineConfig) -> str:
    if not config.prefix_cache:
        return "off"
    least = f"smallest reusable prefix {counted(layout.page_tokens, 'token')}"
    return f"on, {least}" + ("; hybrids need a state snapshot there as well" if layout.state_groups else "")
