"""How fast a step is on this machine, by kind of batch, and whether compiled parts compute what plain ones do.

    python examples/rehearsal/speed.py --data DATA [--compile]

The first thing to run on a new machine: it costs about two minutes and says how many steps fit in the time there is.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import sizes
import torch
from data import Plan, Steps, batch_of
from model import Batch, Run
from train import Trainer, compiler, make_trainer

REPEATS = 4
# Loss of the first step, plain and compiled: bfloat16 is rounded at other places, at most some units of 2^-8.
BOUND = 2.0**-6


def batch_for(steps: Steps, task: str, length: int, device: torch.device) -> Batch:
    random = np.random.default_rng(1)
    rows = [getattr(steps.tasks, task)(random, length) for _ in range(max(1, steps.plan.tokens // length))]
    made = batch_of(rows, random, steps.plan.tokens)
    parts = {name: value.to(device) if value is not None else None for name, value in vars(made).items()}
    return Batch(**parts)


def timed(trainer: Trainer, batch: Batch, sparse: bool) -> dict[str, float]:
    """Seconds of the first step (compiling included) and of the middle one of further ones; peak bytes on a GPU."""
    trainer.step = trainer.plan.dense_steps if sparse else 0
    on_gpu = trainer.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    took = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        told = trainer.learn(batch)
        loss = float(told["sums"][:, 1].sum() / told["sums"][:, 0].sum())
        took.append(time.perf_counter() - begun)
    middle = sorted(took[1:])[REPEATS // 2]
    out = {"first": took[0], "step": middle, "tokens_per_second": batch.ids.numel() / middle, "loss": loss}
    return out | ({"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if on_gpu else {})


def first_loss(trainer: Trainer, batch: Batch, run: Run) -> float:
    """Of untouched masters."""
    trainer.run, trainer.step = run, 0
    kept = {name: value.detach().clone() for name, value in trainer.masters.items()}
    sums = trainer.learn(batch)["sums"]
    with torch.no_grad():
        for name, value in trainer.masters.items():
            value.copy_(kept[name])
    trainer.optimizer.state.clear()
    return float(sums[:, 1].sum() / sums[:, 0].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the speed of training steps.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    torch.set_flush_denormal(True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plan = Plan(tokens=asked.tokens, longest=asked.longest)
    steps = Steps(asked.data, plan)
    config = sizes.SMALL if asked.small else sizes.CONFIG
    trainer = make_trainer(plan, 3e-3, Run(dtype), config, device)
    run = Run(dtype, compile=compiler(asked.compile))
    short = batch_for(steps, "needles", 256, device)
    plain, compiled = first_loss(trainer, short, Run(dtype)), first_loss(trainer, short, run)
    print(
        json.dumps({"plain": plain, "compiled": compiled, "agree": abs(plain - compiled) <= BOUND * plain}), flush=True
    )
    trainer.run = replace(run)
    kinds = [("needles", 256, False), ("picture", 128, False), ("needles", asked.longest, False)]
    for task, length, sparse in (*kinds, ("needles", asked.longest, True)):
        told = timed(trainer, batch_for(steps, task, length, device), sparse)
        print(
            json.dumps({"task": task, "length": length, "sparse": sparse} | {n: round(v, 4) for n, v in told.items()}),
            flush=True,
        )


if __name__ == "__main__":
    main()
