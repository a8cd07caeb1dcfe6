"""Rung 0: the publisher's own code in transformers, behind the same scheduler, sampler and server.

No recipe, no paging, no sharing: each running request has the library's own cache, rows are computed one by one. It is
the minimal closed loop for any model that transformers can load, and nothing more.
"""

from __future__ import annotations

import inspect
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.arch.record_choice import PLAIN
from dayzero.cache.layout import Layout, lay_out
from dayzero.checkpoint.config_json import read_object, stated_dtype
from dayzero.checkpoint.source import Source, open_source
from dayzero.decl import CacheNeed
from dayzero.engine.api import EngineInfo
from dayzero.engine.choose import Chooser
from dayzero.engine.executor import Late
from dayzero.engine.launch import LaunchSpec, LoadProgress
from dayzero.engine.load import ending_ids
from dayzero.engine.step import Row, RowResult, Step, StepResult
from dayzero.errors import CheckpointError, MachineError, ModelError, UsageError
from dayzero.planner.tokenizer_files import read_tokenizer_files

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
DEFAULT_CONTEXT = 4096  # tokens, for a config that states none
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What the scheduler counts pages of: nothing is stored in them, the library keeps its own cache.
COUNTED = CacheNeed("upstream", (1,), "f32", "upstream")
# What a library that runs a stranger's code may raise while it loads.
LOAD_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, OSError, LookupError)


class UpstreamRunner:
    """Executor over ``AutoModelForCausalLM``. Safetensors only; the checkpoint's own code only where it is allowed."""

    overlaps = False  # computes inside ``result``

    def __init__(self, launch: LaunchSpec, progress: LoadProgress | None = None) -> None:
        self._launch, self._progress = launch, progress
        self._queue: deque[tuple[Step, Late | None]] = deque()
        self._caches: dict[int, tuple[int, Any]] = {}  # slot -> (tokens it holds, the library's cache)
        self._info: EngineInfo | None = None

    def load(self) -> None:
        """Errors: UsageError for what is no local checkpoint, MachineError without transformers, ModelError when it
        cannot load the model."""
        launch = self._launch
        if launch.config.cache != PLAIN:
            raise UsageError(f"--cache {launch.config.cache}: the publisher's code keeps a cache of its own.")
        source = open_source(launch.source)
        if not os.path.isdir(launch.source):
            raise UsageError(f"--upstream reads a local folder; download {launch.source} first.")
        config, _ = read_object(source, "config.json")
        if launch.threads is not None:
            torch.set_num_threads(launch.threads)
        self._model = self._loaded(config)
        # The library's own models call it one way; code that comes with a checkpoint may still know the older one only.
        takes = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        self.layout: Layout = lay_out([COUNTED], dtype="f32", page_tokens=launch.config.page_tokens)
        self._info = self._told(source, config)
        longest = self._info.max_model_len
        self.num_slabs = launch.config.max_running * (longest // launch.config.page_tokens + 1)
        self._chooser = Chooser(self._info.stop_ids, launch.config.seed, launch.config.max_running)

    def _loaded(self, config: Mapping[str, Any]) -> Any:
        try:
            import transformers
        except ImportError as error:
            raise MachineError("--upstream needs transformers: pip install 'dayzero[oracle]'") from error
        name = stated_dtype(config) if self._launch.config.dtype == "auto" else self._launch.config.dtype
        if self._progress is not None:
            self._progress(0.0, 0.0)
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(
                self._launch.source, dtype=DTYPES.get(name or "", torch.float32), local_files_only=True,
                use_safetensors=True, trust_remote_code=self._launch.remote_code,
            ).eval()  # fmt: skip
        except LOAD_ERRORS as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            needs_code = "trust_remote_code" in str(error)
            hint = "allow its code with --allow-remote-code" if needs_code else "align names what is wrong"
            raise ModelError(f"transformers cannot load {self._launch.source} ({said[0][:300]}); {hint}.") from error

    def _told(self, source: Source, config: Mapping[str, Any]) -> EngineInfo:
        launch, own = self._launch, self._model.config.get_text_config()
        files = read_tokenizer_files(source, config)
        context = next((int(v) for key in CONTEXT_KEYS if (v := getattr(own, key, None))), DEFAULT_CONTEXT)
        longest = launch.config.context(context)
        vocab = int(self._model.get_output_embeddings().weight.shape[0])
        if longest < 2:
            raise CheckpointError(f"config.json of {launch.source} states a context of {context} tokens.")
        stops = ending_ids(launch, files, vocab)
        kind, dtype = type(self._model).__name__, str(self._model.dtype).removeprefix("torch.")
        table = [
            ("model", f"{kind} of transformers, {dtype}"),
            ("executor", "upstream: the publisher's code, one row after another, no paging, no prefix cache"),
            ("longest context", f"{longest:,} tokens"),
            ("stop ids", ", ".join(map(str, stops)) or "none"),
        ]
        return EngineInfo(
            source=launch.source, family=f"upstream:{getattr(own, 'model_type', kind)}", dtype=dtype,
            max_model_len=longest, vocab=vocab, stop_ids=stops, defaults=files.sampling | launch.defaults, table=table,
            page_tokens=launch.config.page_tokens, pool_tokens=longest * launch.config.max_running,
            max_running=launch.config.max_running,
        )  # fmt: skip

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "load() comes first"
        return self._info

    def submit(self, step: Step) -> int:
        self._queue.append((step, None))
        return step.number

    def sample(self, handle: int, late: Late) -> None:
        at = next(i for i, (step, _) in enumerate(self._queue) if step.number == handle)
        self._queue[at] = (self._queue[at][0], late)

    def result(self, handle: int) -> StepResult:
        step, late = self._queue.popleft()
        assert step.number == handle and late is not None, f"step {handle} is asked for out of order"
        began = time.perf_counter()
        for new in step.new:
            self._chooser.begin(new)
            self._caches.pop(new.slot, None)
        rows = tuple(self._row(row, late) for row in step.rows)
        return StepResult(step.number, rows, time.perf_counter() - began)

    @torch.inference_mode()
    def _row(self, row: Row, late: Late) -> RowResult:
        if row.request_id in late.dropped:
            return RowResult(row.request_id)
        ids = [*row.tokens, int(self._chooser.newest[row.slot])] if row.late else list(row.tokens)
        held, cache = self._caches.get(row.slot, (0, None))
        assert held == row.start, f"slot {row.slot} holds {held} tokens, but token {row.start} comes"
        out = self._model(
            input_ids=torch.tensor([ids]), use_cache=True,
            position_ids=torch.arange(row.start, row.start + row.count)[None], **{self._cache_name: cache},
        )  # fmt: skip
        self._caches[row.slot] = (row.start + row.count, getattr(out, self._cache_name))
        logits_TV: Tensor = out.logits[0].float()
        found = RowResult(row.request_id)
        if row.sample:
            found = self._chooser.choose([row], logits_TV[-1:], late).results()[0]
        if row.prompt_logprobs:
            prompt = self._chooser.prompt_logprobs(row, logits_TV, lambda logits: logits)
            found = RowResult(row.request_id, found.token, found.bad, found.logprobs, prompt)
        return found

    def release(self, slot: int) -> None:
        self._chooser.release(slot)
        self._caches.pop(slot, None)

    def health(self) -> str | None:
        return None if self._info is not None else "the model is not loaded yet"
