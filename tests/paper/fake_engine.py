"""An executor that computes nothing: its tokens are a function of what came before, so that every answer is known.

Run as a script with a file number it is an engine process. The source is a folder whose fake.json holds ``Habits``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dayzero.cache.layout import Layout, lay_out
from dayzero.decl import CacheNeed
from dayzero.engine.api import EngineInfo
from dayzero.engine.config import EngineConfig
from dayzero.engine.events import Logprobs
from dayzero.engine.executor import Late
from dayzero.engine.launch import LaunchSpec, LoadProgress
from dayzero.engine.step import NewSlot, RowResult, Step, StepResult
from dayzero.errors import CheckpointError

VOCAB = 330
STOP = 1


@dataclass(frozen=True)
class Habits:
    """step_seconds: how long a step takes. load: what loading does. never_stop: the stop token is not chosen.
    max_model_len, slabs: what it claims to have. fail_at: the step that raises. poison: prompts that hold this token
    give no numbers. die_on_load_after: loads that work before the process kills itself while loading."""

    step_seconds: float = 0.0
    load: str = "well"
    load_seconds: float = 0.0
    max_model_len: int = 4096
    slabs: int = 64
    fail_at: int = 0
    poison: int = -1
    works_once: bool = False


DEFAULT = Habits()


def next_token(known: Sequence[int]) -> int:
    """The token behind ``known``; about one in thirty stops."""
    value = 0
    for token in known[-8:]:
        value = (value * 1103515245 + token * 12345 + len(known)) % 2147483648
    return STOP if value % 29 == 0 else 2 + value % (VOCAB - 40)


def answer(prompt: Sequence[int], max_tokens: int) -> tuple[list[int], str]:
    """What the fake model says to a prompt, and why it ends."""
    known = list(prompt)
    for _ in range(max_tokens):
        known.append(next_token(known))
        if known[-1] == STOP:
            return known[len(prompt) : -1], "stop"
    return known[len(prompt) :], "length"


class FakeExecutor:
    """Implements Executor. It checks that steps come as the interface says."""

    overlaps = True

    def __init__(self, launch: LaunchSpec, progress: LoadProgress | None = None) -> None:
        self._launch, self._progress = launch, progress
        self.folder = Path(launch.source)
        self.habits = Habits(**json.loads((self.folder / "fake.json").read_text()))
        self._slots: dict[int, list[int]] = {}
        self._params: dict[int, NewSlot] = {}
        self._queue: deque[tuple[Step, Late | None]] = deque()
        self.released: list[int] = []
        self.order: list[str] = []
        self.late: list[Late] = []

    def load(self) -> None:
        habits = self.habits
        loads = self.folder / "loads"
        with loads.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if habits.load == "refuse":
            raise CheckpointError("model.safetensors lacks its last 8 bytes; download it again.")
        if habits.load == "bug":
            raise KeyError("nothing")
        if habits.load == "die" or (habits.works_once and len(loads.read_text().splitlines()) > 1):
            os.kill(os.getpid(), signal.SIGKILL)
        for part in range(5):
            time.sleep(habits.load_seconds / 5)
            if self._progress is not None:
                self._progress(100.0 * (part + 1), 500.0)
        needs = [CacheNeed("layers.0.mixer.kv", (8,), "bf16", "kv_bf16")]
        self._layout = lay_out(needs, dtype="bf16", page_tokens=self._launch.config.page_tokens)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def num_slabs(self) -> int:
        return self.habits.slabs

    @property
    def info(self) -> EngineInfo:
        config = self._launch.config
        return EngineInfo(
            source=self._launch.source, family="fake", dtype="float32", max_model_len=self.habits.max_model_len,
            vocab=VOCAB, stop_ids=[STOP], defaults={}, table=[("model", "fake")], page_tokens=config.page_tokens,
            pool_tokens=1 << 16, max_running=config.max_running,
        )  # fmt: skip

    def submit(self, step: Step) -> int:
        assert len(self._queue) < 2, "two steps ahead"
        self._queue.append((step, None))
        self.order.append(f"submit {step.number}")
        return step.number

    def sample(self, handle: int, late: Late) -> None:
        step, before = self._queue[-1]
        assert step.number == handle and before is None
        self._queue[-1] = (step, late)
        self.order.append(f"sample {handle}")
        self.late.append(late)

    def result(self, handle: int) -> StepResult:
        step, late = self._queue.popleft()
        assert step.number == handle and late is not None
        self.order.append(f"result {handle}")
        if handle == self.habits.fail_at:
            raise ArithmeticError("the device fell off the bus")
        time.sleep(self.habits.step_seconds)
        for new in step.new:
            self._slots[new.slot], self._params[new.slot] = list(new.known), new
        return StepResult(handle, tuple(self._row(step, i, late) for i in range(len(step.rows))), 0.001, 0.0005)

    def _row(self, step: Step, number: int, late: Late) -> RowResult:
        row = step.rows[number]
        known, params = self._slots[row.slot], self._params[row.slot].params
        if row.request_id not in late.dropped:
            assert tuple(known[row.start : row.start + len(row.tokens)]) == row.tokens
        if not row.sample or row.request_id in late.dropped:
            return RowResult(row.request_id)
        if row.request_id in late.refused:
            return RowResult(row.request_id, bad=late.refused[row.request_id])
        if self.habits.poison in known:
            return RowResult(row.request_id, bad="nan")
        token = next_token(known)
        mask = late.masks.get(row.request_id)
        if mask is not None:
            allowed = [i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1]
            token = STOP if STOP in allowed else allowed[token % len(allowed)]
        known.append(token)
        logs = None
        if params.logprobs is not None:
            logs = Logprobs(token, -0.5, 1, [(i, -1.0) for i in range(params.logprobs)])
        return RowResult(row.request_id, token, logprobs=logs)

    def release(self, slot: int) -> None:
        self.released.append(slot)
        self._slots.pop(slot, None)

    def health(self) -> str | None:
        return None


def fake_launch(folder: Path, habits: Habits = DEFAULT, **config: object) -> LaunchSpec:
    """A LaunchSpec whose source is ``folder``, which is laid out so."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "fake.json").write_text(json.dumps(asdict(habits)))
    return LaunchSpec(source=str(folder), config=EngineConfig(**{"debug": True, **config}))  # type: ignore[arg-type]


WORKER = (sys.executable, __file__)

if __name__ == "__main__":
    from dayzero.engine.worker import main

    os._exit(main(sys.argv[1:], FakeExecutor))
