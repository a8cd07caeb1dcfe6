"""Teach the tower alone what stands where in a picture, so that the text model finds it there when it is asked.

From questions and answers alone the tower learns colours and then nothing for thousands of steps: it says the mean
colour at every place, which a text model can use, and from there no small step leads to shapes. So here every token of
a picture is asked, by one matrix that is thrown away afterwards, what its own cell shows and what the whole shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import images
import model
import numpy as np
import phrases
import torch
import torch.nn.functional as F
import vision
from model import Run, Weights
from sizes import Config
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

PARTS = ("vision_tower", "mm_projector")
# What is read from each token: its cell (nothing, or a shape); of the whole, as ``Picture`` gives them.
ASKED = {"cell": 1 + len(phrases.SHAPES), "count": len(phrases.COUNTS), "colour": len(phrases.COLOURS),
         "shape": len(phrases.SHAPES)}  # fmt: skip
BATCH, SEED = 512, 30_000_000  # SEED: beyond all steps and all that is measured
RATE, BETAS, DECAY, CLIP = 2e-3, (0.9, 0.98), 0.05, 1.0
WARM_STEPS, FALL = 100, 0.4  # steps of rising; share of the time in which the rate falls
LOG_EVERY = 50

Arrays = dict[str, Any]


class Pictures(Dataset[Arrays]):
    """Number -> ``size`` pictures: pixels uint8 [P, side, side, 3]; answers int64, cell [P, cells], others [P, 1]."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, number: int) -> Arrays:
        random = np.random.default_rng((SEED, number))
        drawn = [images.draw(random) for _ in range(self.size)]
        cell = np.zeros((self.size, images.CELLS**2), np.int64)
        for row, picture in zip(cell, drawn, strict=True):
            row[list(picture.cells)] = 1 + phrases.SHAPES.index(picture.shape)
        colours = list(phrases.COLOURS)
        return {
            "pixels": np.stack([picture.pixels for picture in drawn]),
            "cell": cell,
            "count": np.array([[picture.count - 1] for picture in drawn]),
            "colour": np.array([[colours.index(picture.colour)] for picture in drawn]),
            "shape": np.array([[phrases.SHAPES.index(picture.shape)] for picture in drawn]),
        }


def cells_of(tokens: int) -> Tensor:
    """The cell [tokens] in which each token of a picture stands; both are numbered row by row."""
    side = int(tokens**0.5)
    place = torch.arange(side) * images.CELLS // side
    return (place[:, None] * images.CELLS + place).flatten()


def losses(seen: Tensor, reader: Tensor, answers: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(mean loss, share right) of what is asked. seen [P, tokens, D]; reader [all answers, D].

    Of the whole every token is asked for itself, and right is what they say together.
    """
    out = {}
    told = dict(zip(ASKED, (seen @ reader.T).split(list(ASKED.values()), -1), strict=True))
    own = cells_of(seen.shape[1]).to(seen.device)
    for name, logits in told.items():
        wanted = answers[name][:, own] if name == "cell" else answers[name].expand(-1, seen.shape[1])
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        said, right = (logits, wanted) if name == "cell" else (logits.mean(1), wanted[:, 0])
        out[name] = loss, (said.argmax(-1) == right).float().mean()
    return out


def teach(
    masters: Weights,
    config: Config,
    run: Run,
    minutes: float,
    workers: int,
    put: Callable[[dict[str, Any]], None],
    size: int = BATCH,
) -> None:
    """Change the tower's masters in place for so many minutes. put: gets a line for the log every LOG_EVERY batches."""
    tower = {name: value for name, value in masters.items() if name.startswith(PARTS)}
    device = next(iter(tower.values())).device
    width = config["vision_config"]["text_hidden_size"]
    reader = torch.zeros(sum(ASKED.values()), width, device=device, requires_grad=True)
    learnt = [*tower.values(), reader]
    groups = [{"params": [v for v in learnt if v.ndim > 1], "weight_decay": DECAY},
              {"params": [v for v in learnt if v.ndim == 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=device.type == "cuda")
    for number, (share, batch) in enumerate(until(minutes, workers, size), 1):
        answers = {name: torch.from_numpy(value).to(device) for name, value in batch.items()}
        weights = model.working(tower, run.dtype)
        seen = run.compile(vision.rows)(answers.pop("pixels"), weights, config, run.dtype)
        told = losses(seen, reader, answers)
        torch.stack([loss for loss, _ in told.values()]).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(learnt, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, number / WARM_STEPS, max(0.01, (1 - share) / FALL))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % LOG_EVERY == 0:
            line = {name: {"loss": round(a.item(), 4), "right": round(b.item(), 4)} for name, (a, b) in told.items()}
            put({"look": number, "pictures": number * size, **line, "norm": round(float(norm), 4)})


def until(minutes: float, workers: int, size: int) -> Iterator[tuple[float, Arrays]]:
    """(share of the time that is over, batch) until it is over."""
    begun = time.monotonic()
    numbers = range(1_000_000)
    made = DataLoader(Pictures(size), batch_size=None, sampler=numbers, num_workers=workers, collate_fn=_as_it_is,
                      prefetch_factor=4 if workers else None)  # fmt: skip
    for batch in made:
        share = (time.monotonic() - begun) / (60 * minutes)
        if share >= 1:
            return
        yield share, batch


def _as_it_is(batch: Arrays) -> Arrays:
    return batch
