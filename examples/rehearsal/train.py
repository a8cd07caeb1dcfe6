"""Train the rehearsal model: as many steps as fit in so many minutes, from the state in DIR if there is one.

    python examples/rehearsal/train.py --data DATA --out DIR --minutes 7 --compile

DIR gets the state (pieces below 16 MB), ``log.jsonl`` (one line every few steps) and, at the end, what the held-out
text costs. Dense steps come first, in which the index learns from the attention; then steps in which tokens see only
what the index picks. The learning rate rises, stays, and falls to nothing over the last part of all steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bpe
import look
import measure
import model
import numpy as np
import sizes
import state
import torch
from data import KINDS, Arrays, Plan, Steps, loader, moved
from model import Batch, Run
from tasks import Tasks
from torch import Tensor

WARM_STEPS, FALL = 200, 0.35  # steps of rising; share of all steps in which the rate falls
BETAS, DECAY, CLIP = (0.9, 0.98), 0.1, 1.0
BALANCE = 1e-3  # by which a router's bias moves a step, against the load
TOWER_RATE = 0.3  # of the rate: it comes taught, and is to stay so while the text model learns to read it
INDEX_WEIGHT = 1.0
LOG_EVERY = 20
BIAS = "e_score_correction_bias"


@dataclass
class Trainer:
    """masters: float32 leaves. Everything that a step changes is here."""

    masters: dict[str, Tensor]
    optimizer: torch.optim.AdamW
    plan: Plan
    rate: float
    run: Run
    config: sizes.Config
    step: int = 0

    @property
    def device(self) -> torch.device:
        return self.masters["model.norm.weight"].device

    def learn(self, batch: Batch) -> dict[str, Tensor]:
        """One step; tensors on the device: ``sums`` [kinds, 3] (count, loss, hits) and the index's loss."""
        run = replace(self.run, sparse=self.plan.is_sparse(self.step), index_losses=[], loads={})
        weights = model.working(self.masters, run.dtype)
        h = model.hidden(weights, self.config, batch, run)
        losses, hits = run.compile(model.token_losses)(h, weights["lm_head.weight"], batch.targets.flatten())
        weight = batch.weight.flatten()
        index_loss = torch.stack(run.index_losses).mean()
        loss = (losses * weight).sum() / weight.sum().clamp_min(1.0) + INDEX_WEIGHT * index_loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([v for v in self.masters.values() if v.grad is not None], CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * group["scale"] * factor(self.step, self.plan.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for number, load in run.loads.items():
                bias = self.masters[f"model.layers.{number}.block_sparse_moe.gate.{BIAS}"]
                bias += BALANCE * torch.sign(load.mean() - load)
        self.step += 1
        most = torch.stack([load.max() / load.mean() for load in run.loads.values()]).max()
        return {"sums": by_kind(losses.detach(), hits, batch.kind.flatten()), "index": index_loss.detach(),
                "norm": norm, "load": most}  # fmt: skip


def factor(step: int, steps: int) -> float:
    """Of the learning rate: rises over WARM_STEPS, falls linearly over the last FALL of all steps."""
    left = (steps - step) / max(1.0, FALL * steps)
    return min(1.0, (step + 1) / WARM_STEPS, max(0.0, left))


def by_kind(losses: Tensor, hits: Tensor, kind: Tensor) -> Tensor:
    """[kinds, 3]: how many tokens, the sum of their losses, how many were the likeliest."""
    values = torch.stack((torch.ones_like(losses), losses, hits.to(losses.dtype)), 1)
    return losses.new_zeros(len(KINDS), 3).index_add_(0, kind.long(), values)


def make_trainer(plan: Plan, rate: float, run: Run, config: sizes.Config, device: torch.device) -> Trainer:
    masters = {name: value.to(device) for name, value in model.initial(config, plan.seed).items()}
    parts: dict[tuple[float, float], list[Tensor]] = defaultdict(list)  # by (scale of the rate, decay)
    for name, value in masters.items():
        if name.endswith(BIAS):
            continue
        shrinks = value.ndim > 1 and not name.endswith((*model.IN_F32, "res_proj.weight"))
        scale = TOWER_RATE if name.startswith(look.PARTS) else 1.0
        parts[scale, DECAY if shrinks else 0.0].append(value.requires_grad_())
    groups = [{"params": own, "scale": scale, "weight_decay": decay} for (scale, decay), own in parts.items()]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=1e-10, fused=device.type == "cuda")
    return Trainer(masters, optimizer, plan, rate, run, config)


def measured(trainer: Trainer, data: Path, count: int) -> dict[str, Any]:
    """The goals on text that was held out; not compiled, since these shapes come once."""
    run = Run(trainer.run.dtype, sparse=trainer.plan.is_sparse(trainer.step))
    with torch.no_grad():
        held = measure.Model(model.working(trainer.masters, run.dtype), trainer.config, run)
    maker = Tasks(bpe.read(data / "tiktoken.model"), np.load(data / "text.npz")["held_out"])
    return measure.all_of(held, maker, trainer.plan.longest, count)


class Log:
    """Sums over LOG_EVERY steps, by kind, and by the length of rows where numbers are retrieved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self.sums: dict[int, list[Tensor]] = defaultdict(list)
        self.last: dict[str, Tensor] = {}
        self.tokens, self.since = 0, time.perf_counter()

    def add(self, length: int, tokens: int, told: dict[str, Tensor]) -> None:
        self.sums[length].append(told["sums"])
        self.last = told
        self.tokens += tokens

    def write(self, trainer: Trainer) -> dict[str, Any]:
        every = torch.stack([one for sums in self.sums.values() for one in sums]).sum(0).tolist()
        line: dict[str, Any] = {"step": trainer.step, "sparse": trainer.plan.is_sparse(trainer.step - 1)}
        for name, (count, loss, hits) in list(zip(KINDS, every))[1:]:
            if count:
                line[name] = {"tokens": int(count), "loss": round(loss / count, 4), "right": round(hits / count, 4)}
        by_length = {
            n: torch.stack(sums).sum(0)[KINDS.index("number")].tolist() for n, sums in sorted(self.sums.items())
        }
        line["numbers_by_length"] = {n: round(hits / count, 4) for n, (count, _, hits) in by_length.items() if count}
        line |= {name: round(float(self.last[name]), 4) for name in ("index", "norm", "load")}
        seconds = time.perf_counter() - self.since
        line |= {"rate": trainer.optimizer.param_groups[0]["lr"], "tokens_per_second": round(self.tokens / seconds)}
        self.put(line)
        self.clear()
        return line

    def put(self, line: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def train(trainer: Trainer, batches: Iterable[Arrays], until: float, out: Path, keep_every: float) -> None:
    """Until the plan or the clock ends (``time.monotonic``). The state is kept every ``keep_every`` seconds."""
    log = Log(out / "log.jsonl")
    kept = time.monotonic()
    for made in batches:
        batch = moved(made, trainer.device)
        told = trainer.learn(batch)
        log.add(batch.ids.shape[1], batch.ids.numel(), told)
        if trainer.step % LOG_EVERY == 0:
            line = log.write(trainer)
            if not math.isfinite(line["norm"]):
                raise ValueError(f"step {trainer.step}: the gradient is {line['norm']}; the last state is kept")
            print(json.dumps(line), flush=True)
        if time.monotonic() > until:
            break
        if time.monotonic() > kept + keep_every:
            keep(trainer, out)
            kept = time.monotonic()


def teach_tower(trainer: Trainer, minutes: float, workers: int, log: Log) -> None:
    """In place. The optimiser forgets the tower: what it knows is of another loss."""

    def put(line: dict[str, Any]) -> None:
        log.put({"step": trainer.step, **line})
        print(json.dumps(line), flush=True)

    look.teach(trainer.masters, trainer.config, trainer.run, minutes, workers, put)
    for name, value in trainer.masters.items():
        if name.startswith(look.PARTS):
            trainer.optimizer.state.pop(value, None)


def keep(trainer: Trainer, out: Path) -> None:
    state.save(out, state.of(trainer.step, trainer.config, trainer.masters, trainer.optimizer))


def compiler(on: bool) -> Callable[[Any], Any]:
    if not on:
        return lambda f: f
    torch._dynamo.config.cache_size_limit = 32
    return functools.cache(lambda f: torch.compile(f, dynamic=False, fullgraph=True))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the rehearsal model.")
    parser.add_argument("--data", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the state; goes on with one that is there")
    parser.add_argument("--minutes", type=float, default=7.0, help="stop after so long, start and compiling included")
    parser.add_argument("--steps", type=int, default=6000, help="dense steps in all")
    parser.add_argument("--sparse-steps", type=int, default=800, help="steps with the index in use, after those")
    parser.add_argument("--tokens", type=int, default=65536, help="of a batch")
    parser.add_argument("--longest", type=int, default=8192, help="longest row")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12, help="processes that make batches")
    parser.add_argument("--look", type=float, default=0.0, metavar="MINUTES", help="teach the tower alone first")
    parser.add_argument("--keep-minutes", type=float, default=2.0, help="between states")
    parser.add_argument("--measure", type=int, default=256, help="needles at each length, and pictures, at the end")
    parser.add_argument("--compile", action="store_true", help="torch.compile the parts of a layer")
    parser.add_argument("--small", action="store_true", help="a model of 0.5 M parameters, for trials on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    begun, asked = time.monotonic(), parsed()
    asked.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(asked.device)
    plan = Plan(asked.tokens, asked.steps, asked.sparse_steps, asked.longest, asked.seed)
    torch.set_flush_denormal(True)  # a decay's far end is far below what counts, and slow on a CPU
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = sizes.SMALL if asked.small else sizes.CONFIG
    trainer = make_trainer(plan, asked.rate, Run(dtype, compile=compiler(asked.compile)), config, device)
    if (asked.out / state.FILE).exists():
        trainer.step = state.resume(state.load(asked.out), trainer.masters, trainer.optimizer)
    if asked.look:
        teach_tower(trainer, asked.look, asked.workers, Log(asked.out / "log.jsonl"))
    first = trainer.step
    batches = loader(Steps(asked.data, plan), range(first, plan.steps), asked.workers)
    train(trainer, batches, begun + asked.minutes * 60, asked.out, asked.keep_minutes * 60)
    keep(trainer, asked.out)
    told = measured(trainer, asked.data, asked.measure) if asked.measure else {}
    line = {
        "step": trainer.step,
        "of": plan.steps,
        "from": first,
        "seconds": round(time.monotonic() - begun, 1),
        **told,
    }
    Log(asked.out / "log.jsonl").put(line)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
