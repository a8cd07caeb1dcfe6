"""One engine with given settings, the requests that are put to it, and the answers; all through the offline API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
import torch

from dayzero.acceptance.stages.equal_array import Row
from dayzero.arch.record_choice import NARROW, PLAIN, with_records
from dayzero.arch.spec import ModelSpec
from dayzero.cache.layout import Dtype, Layout, lay_out
from dayzero.cache.manager import CacheManager
from dayzero.engine.answer import RequestOutput
from dayzero.engine.llm import LLM
from dayzero.engine.request import SamplingParams
from dayzero.errors import MachineError

REFERENCE, FLOAT32, SERVED = "reference", "float32", "served"
WIDE_POOL_SEQUENCES = 12  # that fit side by side, with what they leave in the cache
MOST_POOLS = 4  # tried until somebody is preempted
PART_OF_A_PAGE = 43  # less three: of 64 more than a half, of 16 two pages and a half
TIGHT_LENGTHS, TIGHT_PAGE = (
    (14, 15, 16, 17),
    16,
)  # prompts that outgrow their pages as soon as they have begun to answer
STEP_TOKENS = 96
BASE: Mapping[str, Any] = {
    "prefix": False, "chunk": None, "together": False, "tight": False, "narrow": False, "sampled": False, "page": 64,
}  # fmt: skip
TEMPERATURE, TOP_P, SEED = 1.5, 0.99, 11


@dataclass(frozen=True, slots=True)
class Subject:
    """What engines are made of. lengths: of the prompts in tokens. The last one shares its first tokens with the first,
    the third so few that they part within a page. answer_tokens: of each answer."""

    source: str
    recipe: str | None
    spec: ModelSpec
    served_dtype: Dtype
    lengths: tuple[int, ...]
    answer_tokens: int
    seed: int = 0

    @property
    def max_len(self) -> int:
        return max(self.lengths) + self.answer_tokens

    def prompts(self) -> list[list[int]]:
        """Seeded ids. Placeholders of images, which would need one, are left out."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        pad = self.spec.vision.pad_id if self.spec.vision is not None else -1
        vocab = min(self.spec.vocab, 4096)
        found = []
        for length in self.lengths:
            ids = torch.randint(3, vocab, (length,), generator=draw).tolist()
            found.append([i if i != pad else (i + 1) % vocab for i in ids])
        for number, most in ((2, PART_OF_A_PAGE), (len(found) - 1, self.max_len)):
            ids = found[number]
            shared = min(most, len(found[0]), len(ids)) - 3
            found[number] = found[0][:shared] + ids[shared:]
        return found


@dataclass(slots=True)
class Ran:
    """rounds: answers to all prompts, once, or twice where prefixes are kept. cached: prompt tokens that the last round
    found. preemptions: of the engine. problem: why there are no answers."""

    rounds: list[list[RequestOutput]] = field(default_factory=list)
    cached: int = 0
    preemptions: int = 0
    problem: str = ""


def dtype_of(subject: Subject, path: str) -> Dtype:
    return subject.served_dtype if path == SERVED else "f32"


def engine(subject: Subject, path: str, num_slabs: int | None = None, **options: Any) -> LLM:
    """An engine of that path: ``served`` as it is by default, ``float32`` with the plan's variants, ``reference``.

    num_slabs: of the pool; None: room for all that is asked.
    """
    chosen: dict[str, Any] = {"recipe": subject.recipe, "max_running": 8, "max_step_tokens": STEP_TOKENS}
    if path != SERVED:
        chosen |= {"dtype": "float32"} | ({"bindings": (("*", "reference"),)} if path == REFERENCE else {})
    chosen["max_model_len"] = subject.max_len
    layout = layout_of(subject, path, options.get("page_tokens", 64), options.get("cache", PLAIN))
    slabs = num_slabs or WIDE_POOL_SEQUENCES * least_slabs(subject, layout)
    return LLM(subject.source, **(chosen | {"pool_bytes": slabs * layout.slab_bytes} | options))


def layout_of(subject: Subject, path: str, page: int, cache: str) -> Layout:
    return lay_out(with_records(subject.spec, cache).cache(), dtype=dtype_of(subject, path), page_tokens=page)


def least_slabs(subject: Subject, layout: Layout) -> int:
    """Of the least pool in which a sequence of the longest length is served."""
    least = max(1, len(layout.token_groups))
    while CacheManager(layout, least).why_never(subject.max_len) is not None:
        least += 1
    return least


def tight_pools(subject: Subject, layout: Layout) -> Iterator[int]:
    """Slabs of pools in which several of the prompts can begin together and not all of these can come to their ends."""
    least = least_slabs(subject, layout)
    for slabs in range(least, 4 * least + len(subject.lengths)):
        manager = CacheManager(layout, slabs, prefix=False)
        begun = []
        for number, prompt in enumerate(subject.prompts()):
            if manager.open(str(number), prompt) is None or not manager.extend(str(number), len(prompt)):
                break
            begun.append((str(number), len(prompt) + subject.answer_tokens))
        if len(begun) > 1 and not all(manager.extend(name, end) for name, end in begun):
            yield slabs


def params_of(subject: Subject, row: Row, number: int) -> SamplingParams:
    greedy = SamplingParams(temperature=0, max_tokens=subject.answer_tokens, ignore_eos=True, logprobs=2)
    if not row["sampled"]:
        return greedy
    return msgspec.structs.replace(greedy, temperature=TEMPERATURE, top_p=TOP_P, seed=SEED + number)


def options_of(row: Row) -> dict[str, Any]:
    """Options of the engine that a row asks for."""
    return {
        "prefix_cache": row["prefix"],
        "chunk_tokens": row["chunk"],
        "page_tokens": row["page"],
        "cache": NARROW if row["narrow"] else PLAIN,
    }


def run_row(subject: Subject, row: Row) -> Ran:
    """Put all prompts to an engine with these settings: at once or one by one, twice where prefixes are kept. Pools are
    tried until one is so tight that somebody is preempted."""
    if not row["tight"]:
        with engine(subject, row["path"], **options_of(row)) as llm:
            return _rounds(subject, row, llm)
    options = options_of(row)
    layout = layout_of(subject, row["path"], options["page_tokens"], options["cache"])
    for slabs in islice(tight_pools(subject, layout), MOST_POOLS):
        try:
            with engine(subject, row["path"], slabs, **options) as llm:
                ran = _rounds(subject, row, llm)
        except MachineError:
            continue  # too small for what an engine promises
        if ran.preemptions:
            return ran
    return Ran(problem="no pool that was tried was tight enough to preempt anybody")


def _rounds(subject: Subject, row: Row, llm: LLM) -> Ran:
    prompts = subject.prompts()
    params = [params_of(subject, row, number) for number in range(len(prompts))]
    ran = Ran()
    for _ in range(2 if row["prefix"] else 1):
        ran.rounds.append(_ask(llm, prompts, params, row["together"]))
    ran.cached = sum(output.cached_tokens for output in ran.rounds[-1])
    ran.preemptions = int(llm.progress().counters.get("preemptions", 0))
    return ran


def _ask(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], together: bool
) -> list[RequestOutput]:
    if together:
        return llm.generate(list(prompts), list(params))
    return [llm.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
