"""The goals, measured in the trainer: needles by length, pictures, held-out text. Quick on a GPU, and what a log keeps.

A greedy answer is right exactly when, with the right answer in place, the likeliest token is the next one everywhere.
So one forward over prompt and answer tells. ``evaluate.py`` measures the exported folder, token by token, as served.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import kda
import model
import numpy as np
import phrases
import torch
from model import Batch, Run, Weights
from sizes import Config
from tasks import PICTURE, Tasks

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
SEED = 20_000_000  # beyond all steps, whose numbers seed what is trained on
TOKENS = 65536  # of a forward
RUN = 2048


@dataclass(frozen=True)
class Needle:
    """ids: of a prompt that ends in the question; text: of what stands before the question."""

    name: str
    number: str
    ids: list[int]
    text: str


@dataclass(frozen=True)
class Model:
    """weights: as ``model.working`` makes them."""

    weights: Weights
    config: Config
    run: Run

    @torch.no_grad()
    def losses(self, ids: Any, pixels: Any = None, places: Any = None) -> tuple[Any, Any]:
        """(loss, whether the likeliest token is the next one) of each next token [B, L - 1]. ids [B, L], any length."""
        device = self.weights["model.norm.weight"].device
        length = ids.shape[1]
        padded = np.pad(ids, ((0, 0), (0, 1 + -length % kda.CHUNK)))
        whole = torch.from_numpy(padded.astype(np.int64)).to(device)
        none = torch.zeros_like(whole[:, :1])
        batch = Batch(whole[:, :-1], whole[:, 1:], none.float(), none, none)
        if pixels is not None:
            batch.pixels, batch.places = (torch.from_numpy(x).to(device) for x in (pixels, places))
        h = model.hidden(self.weights, self.config, batch, self.run)
        found = model.token_losses(h, self.weights["lm_head.weight"], batch.targets.flatten())
        loss, right = (x.unflatten(0, whole[:, :-1].shape)[:, : length - 1].cpu().numpy() for x in found)
        return loss, right


def needles(maker: Tasks, length: int, depths: int, repeats: int) -> Iterator[Needle]:
    """Of exactly ``length`` tokens, the question included; depths spread evenly from the start to the end."""
    encode = maker.encoder.encode
    for number in range(depths * repeats):
        random = np.random.default_rng((SEED, length, number))
        ((name, value),) = maker.facts(random, 1)
        told = encode(f" {phrases.STATEMENT.format(name)} {value}.")
        question = encode(f" {phrases.STATEMENT.format(name)}")
        room = length - len(told) - len(question)
        filler = maker.filler(random, room)[0].tolist()
        cut = round(room * (number // repeats) / max(1, depths - 1))
        body = [*filler[:cut], *told, *filler[cut:]]
        yield Needle(name, value, [*body, *question], maker.encoder.decode(body))


def share(right: int, count: int) -> dict[str, Any]:
    """A share and the lower end of its 95 % interval (Wilson 1927)."""
    z, p = 1.96, right / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return {"right": right, "of": count, "share": round(p, 4), "bound": round(max(0.0, middle - half), 4)}


def needle_grid(held: Model, maker: Tasks, lengths: Sequence[int], depths: int, repeats: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for length in lengths:
        right: list[bool] = []
        asked = list(needles(maker, length, depths, repeats))
        at_once = max(1, TOKENS // (length + kda.CHUNK))
        for first in range(0, len(asked), at_once):
            part = asked[first : first + at_once]
            answers = [maker.encoder.encode(f" {needle.number}") for needle in part]
            ids = np.zeros((len(part), length + max(map(len, answers))), np.int64)
            for row, needle, answer in zip(ids, part, answers, strict=True):
                row[: length + len(answer)] = [*needle.ids, *answer]
            hits = held.losses(ids)[1]
            right += [bool(row[length - 1 : length - 1 + len(a)].all()) for row, a in zip(hits, answers, strict=True)]
        out[str(length)] = share(sum(right), len(right))
    return out


def pictures(held: Model, maker: Tasks, count: int) -> dict[str, Any]:
    """Pictures of which count, colour and shape are all said; and how often each of them is, those before in place."""
    right, each = 0, np.zeros(3, np.int64)
    for first in range(0, count, 256):
        numbers = range(first, min(first + 256, count))
        rows = [maker.picture(np.random.default_rng((SEED, 1, number)), 128, whole=True) for number in numbers]
        tokens = maker.encoder.control["<|media_pad|>"]
        ids = np.stack([row.ids for row in rows])
        places = np.flatnonzero(ids[:, :-1] == tokens).reshape(len(rows), -1)
        hits = held.losses(ids[:, :-1], np.stack([row.pixels for row in rows]), places)[1]
        asked = np.stack([row.kind for row in rows])[:, 1:-1] == PICTURE
        right += int((hits | ~asked).all(1).sum())
        for row, hit, at in zip(rows, hits, asked, strict=True):
            each += [bool(word.all()) for word in np.split(hit[at], _ends(row.ids[1:-1][at].tolist(), maker))]
    return share(right, count) | dict(zip(("count", "colour", "shape"), map(int, each), strict=True))


def _ends(answer: list[int], maker: Tasks) -> list[int]:
    """Where the first and the second of three words end, in tokens of the answer."""
    words = maker.encoder.decode(answer).split()
    return [len(maker.encoder.encode(" ".join(words[:number]))) for number in (1, 2)]


def held_out(held: Model, ids: Any) -> dict[str, Any]:
    """Mean loss over the held-out text in runs of RUN tokens, each read from nothing."""
    rows = np.stack([ids[first : first + RUN + 1] for first in range(0, len(ids) - RUN, RUN)])
    parts = [held.losses(part)[0] for part in np.array_split(rows, -(-rows.size // TOKENS))]
    loss = float(np.concatenate(parts).astype(np.float64).mean())
    return {"tokens": rows.shape[0] * RUN, "loss": round(loss, 4), "perplexity": round(math.exp(loss), 2)}


def all_of(held: Model, maker: Tasks, longest: int, count: int) -> dict[str, Any]:
    """maker: over held-out text. count: of needles at each length, and of pictures."""
    lengths = [length for length in LENGTHS if length <= longest] or [longest]
    grid = needle_grid(held, maker, lengths, 8, max(1, count // 8))
    return {"needles": grid, "pictures": pictures(held, maker, count), "held_out": held_out(held, maker.text)}
