"""Batches as a pure function of (seed, step), so that a resumed run sees what an uninterrupted one would.

Every batch has the same number of tokens; their rows are longer as training goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import bpe
import numpy as np
import torch
from model import Batch
from tasks import KINDS, NUMBER, PICTURE, Random, Row, Tasks
from torch.utils.data import DataLoader, Dataset

Arrays = dict[str, Any]  # the parts of a Batch that are there

PICTURE_LENGTH = 128
ROWS = 512  # sampled for the index's loss, in a whole batch

# (up to this share of the dense steps, share of batches by length of their rows); pictures come besides. A row that
# shows a picture has room for a question and its answer, so that a batch shows as many as it can.
CURRICULUM: tuple[tuple[float, dict[int, float]], ...] = (
    (0.12, {256: 0.7, 512: 0.3}),
    (0.30, {256: 0.3, 512: 0.3, 1024: 0.4}),
    (0.50, {256: 0.15, 512: 0.15, 1024: 0.25, 2048: 0.25, 4096: 0.2}),
    (1.00, {256: 0.15, 512: 0.1, 1024: 0.15, 2048: 0.2, 4096: 0.15, 8192: 0.25}),
)
# With the index in use: it matters only where rows are longer than what it picks.
SPARSE = {256: 0.2, 512: 0.1, 1024: 0.15, 2048: 0.15, 4096: 0.15, 8192: 0.25}
PICTURES = 0.5
# Share of rows by task, in batches of short rows and of long ones.
SHORT = {"needles": 0.3, "needle_chat": 0.2, "talk": 0.15, "copies": 0.1, "plain": 0.25}
LONG = {"needles": 0.5, "needle_chat": 0.3, "plain": 0.2}


@dataclass(frozen=True)
class Plan:
    """tokens of a batch; dense_steps, then sparse_steps; longest row."""

    tokens: int = 65536
    dense_steps: int = 6000
    sparse_steps: int = 800
    longest: int = 8192
    seed: int = 0

    @property
    def steps(self) -> int:
        return self.dense_steps + self.sparse_steps

    def is_sparse(self, step: int) -> bool:
        return step >= self.dense_steps

    def length(self, step: int, random: Random) -> int:
        """Of the rows of a step; 0 for a batch of pictures."""
        if random.random() < PICTURES:
            return 0
        share = (step + 1) / max(1, self.dense_steps)
        chances = SPARSE if self.is_sparse(step) else next(c for until, c in CURRICULUM if share <= until)
        fitting = {length: chance for length, chance in chances.items() if length <= self.longest}
        fitting = fitting or {self.longest: 1.0}
        odds = np.array(list(fitting.values()))
        return int(random.choice(list(fitting), p=odds / odds.sum()))


class Steps(Dataset[Batch]):
    """Step number -> its batch. folder: what corpus.py wrote."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.plan = plan
        self.tasks = Tasks(bpe.read(folder / "tiktoken.model"), np.load(folder / "text.npz")["train"])

    def __getitem__(self, step: int) -> Batch:
        random = np.random.default_rng((self.plan.seed, step))
        length = self.plan.length(step, random)
        pictures = length == 0
        length = length or PICTURE_LENGTH
        odds = SHORT if length <= 512 else LONG
        rows = []
        for _ in range(max(1, self.plan.tokens // length)):
            task = "picture" if pictures else str(random.choice(list(odds), p=list(odds.values())))
            rows.append(getattr(self.tasks, task)(random, length))
        return batch_of(rows, random, self.plan.tokens)


def batch_of(rows: list[Row], random: Random, tokens: int) -> Batch:
    ids, weight, kind = (np.stack([getattr(row, part) for row in rows]) for part in ("ids", "weight", "kind"))
    length = ids.shape[1] - 1
    sampled = np.stack([_sample(row.kind[1:], random, max(1, ROWS * length // tokens)) for row in rows])
    out = Batch(
        torch.from_numpy(ids[:, :-1].astype(np.int64)),
        torch.from_numpy(ids[:, 1:].astype(np.int64)),
        torch.from_numpy(weight[:, 1:].copy()),
        torch.from_numpy(kind[:, 1:].copy()),
        torch.from_numpy(sampled),
    )
    if rows[0].pixels is not None:
        pad_id = rows[0].ids[rows[0].place]
        out.pixels = torch.from_numpy(np.stack([row.pixels for row in rows]))
        out.places = torch.from_numpy(np.flatnonzero(ids[:, :-1] == pad_id).reshape(len(rows), -1))
    return out


def _sample(kind: Any, random: Random, count: int) -> Any:
    """Places whose attention the index learns: half of them where something is to be retrieved, if there are such."""
    sharp = np.flatnonzero((kind == NUMBER) | (kind == PICTURE))
    any_place = random.integers(0, len(kind), count)
    if not len(sharp):
        return any_place
    return np.where(random.random(count) < 0.5, random.choice(sharp, count), any_place)


def loader(steps: Steps, numbers: Iterable[int], workers: int) -> Iterable[Arrays]:
    """Batches of the given steps in their order, made ahead by ``workers`` processes.

    As arrays, since those are sent through a pipe: tensors would need more shared memory than containers have.
    """
    ahead = 4 if workers else None
    return DataLoader(
        steps, batch_size=None, sampler=numbers, num_workers=workers, collate_fn=arrays, prefetch_factor=ahead
    )


def arrays(batch: Batch) -> Arrays:
    parts = {one.name: getattr(batch, one.name) for one in fields(batch)}
    return {name: value.numpy() for name, value in parts.items() if value is not None}


def moved(batch: Arrays, device: torch.device) -> Batch:
    return Batch(**{name: torch.from_numpy(value).to(device) for name, value in batch.items()})


__all__ = ["KINDS", "Plan", "Steps", "loader", "moved"]
