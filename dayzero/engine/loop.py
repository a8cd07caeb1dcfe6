"""EngineLoop: the one loop between requests and steps. It knows no process and no socket. Paper.

One turn: schedule the next step and submit it, take the result of the step before, and let the next one be sampled with
what that result made known. So the host's work for a step hides behind the device's work for another. An executor that
computes nothing until it is asked for a result is not run ahead of.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from dayzero.engine.events import Abort, Batch, Drain, Output, Progress, Stop, Submit, ToEngine
from dayzero.engine.executor import Executor, Late
from dayzero.engine.grammar import GrammarError, Grammars
from dayzero.engine.media import ImageInfo, why_not
from dayzero.engine.request import NewRequest
from dayzero.engine.scheduler import Scheduler
from dayzero.engine.step import Step, StepResult

STEPS_REMEMBERED = 100  # for the slowest step and the host's share


class EngineLoop:
    """Owns executor, scheduler and grammars from here on; nobody else calls them. Not for several threads.

    Every request that is taken gets outputs, the last of which has ``finish`` set: exactly one.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        grammars: Grammars,
        clock: Callable[[], float] = time.time,
        *,
        run_ahead: bool | None = None,
        images: ImageInfo | None = None,
    ) -> None:
        """executor: loaded. clock: seconds since the epoch. run_ahead: schedule one step ahead of results; None: where
        the executor computes while the host goes on. images: what the executor takes, None: none."""
        self._executor, self._scheduler, self._grammars, self._clock = executor, scheduler, grammars, clock
        self._run_ahead = executor.overlaps if run_ahead is None else run_ahead
        self._images = images
        self._live: set[str] = set()
        self._ahead: tuple[int, Step] | None = None  # handle of the step that is sampled, or being computed
        self._outputs: list[Output] = []  # to be sent with the next batch
        self._draining = False
        self._stopped = False
        self._step = 0
        self._last_step = clock()
        self._began = 0.0  # of the newest step's time: its submission, or the end of the step before
        self._seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)  # whole steps
        self._in_operators: deque[float] = deque(maxlen=STEPS_REMEMBERED)

    # --- requests

    def take(self, message: ToEngine) -> None:
        """Act on one message. What it leads to comes with the next ``turn``."""
        if isinstance(message, Submit):
            for request in message.requests:
                self._submit(request)
        elif isinstance(message, Abort):
            for request_id in message.ids:
                self._abort(request_id)
        elif isinstance(message, Drain):
            self._draining = True
        else:
            assert isinstance(message, Stop)
            self._stopped = True
            for request_id in sorted(self._live):
                self._abort(request_id)

    def _submit(self, request: NewRequest) -> None:
        assert request.id not in self._live, f"request id {request.id} is in use"
        self._live.add(request.id)
        if self._draining or self._stopped:
            why = "the engine is being shut down and takes no new requests"
            self._tell(Output(id=request.id, finish="error", error=("overloaded", why)))
        elif request.params.grammar is not None:
            self._grammars.begin(request)
        else:
            self._add(request)

    def _add(self, request: NewRequest) -> None:
        why = why_not(request, self._images)
        if why is not None:
            self._tell(Output(id=request.id, finish="error", error=("internal", why)))
            return
        refused = self._scheduler.add(request)
        if refused is not None:
            self._tell(refused)

    def _abort(self, request_id: str) -> None:
        if self._grammars.cancel(request_id):
            self._tell(Output(id=request_id, finish="abort"))
        else:
            output = self._scheduler.abort(request_id)
            if output is not None:
                self._tell(output)

    def _tell(self, output: Output) -> None:
        """Every output passes here, once. Its tokens are committed, so the request's grammar moves on."""
        assert output.id in self._live, f"an output of {output.id}, which has ended or was never there"
        if output.finish is None:
            self._grammars.advance(output.id, output.tokens)
        else:
            self._live.discard(output.id)
            self._grammars.end(output.id)
        self._outputs.append(output)

    # --- steps

    @property
    def busy(self) -> bool:
        """Whether ``turn`` has something to do before the next message, or the next compiled grammar, comes."""
        return bool(self._ahead or self._outputs or self._scheduler.num_running or self._scheduler.num_waiting)

    @property
    def ended(self) -> bool:
        """Whether it was told to end and has told every request so. Nothing needs to be computed any more."""
        return (self._stopped or self._draining) and not self._live and not self._outputs

    @property
    def num_live(self) -> int:
        """Requests that have been taken and have not ended."""
        return len(self._live)

    def turn(self, wait: bool = False) -> Batch | None:
        """At most one step's result, and the start of the next step. None: nothing has happened.

        wait: when there is nothing else to do, wait for a grammar that is being compiled.
        """
        idle = wait and not self.busy
        for request, why in self._grammars.ready(wait=idle):
            if why is None:
                self._add(request)
            else:
                self._tell(Output(id=request.id, finish="error", error=("grammar", why)))
        num_tokens = 0
        if not self._stopped:
            num_tokens = self._one_ahead() if self._run_ahead else self._one_by_one()
        if not num_tokens and not self._outputs:
            return None
        outputs, self._outputs = self._outputs, []
        return Batch(outputs, self.progress(), num_tokens)

    def _one_ahead(self) -> int:
        """The next step is scheduled and submitted before the result of the one before is waited for. Returns the
        tokens of the step that has ended."""
        before, self._ahead = self._ahead, self._begin()
        num_tokens = 0
        if before is not None:
            num_tokens = before[1].num_tokens
            self._finish(self._executor.result(before[0]))
        if self._ahead is not None:
            self._executor.sample(self._ahead[0], self._late(self._ahead[1]))
        return num_tokens

    def _one_by_one(self) -> int:
        """A whole step: for executors that compute inside ``result``, where being ahead would only make those that
        arrive meanwhile wait for a step more."""
        begun = self._begin()
        if begun is None:
            return 0
        handle, step = begun
        self._executor.sample(handle, self._late(step))
        self._finish(self._executor.result(handle))
        return step.num_tokens

    def _begin(self) -> tuple[int, Step] | None:
        """Schedule and submit the next step, if there is anything to compute."""
        step = self._scheduler.schedule()
        self._release()
        for output in self._scheduler.take_outputs():
            self._tell(output)
        if step is None:
            return None
        if self._ahead is None:
            self._began = time.perf_counter()
        return self._executor.submit(step), step

    def _finish(self, result: StepResult) -> None:
        for output in self._scheduler.commit(result):
            self._tell(output)
        self._release()
        now = time.perf_counter()
        self._seconds.append(now - self._began)
        self._in_operators.append(result.seconds - result.host_seconds)
        self._began = now
        self._step = result.number
        self._last_step = self._clock()

    def _release(self) -> None:
        for slot in self._scheduler.take_released():
            self._executor.release(slot)

    def _late(self, step: Step) -> Late:
        """What sampling of ``step`` needs to know by now."""
        dropped = self._scheduler.dropped
        masks: dict[str, bytes] = {}
        refused: dict[str, str] = {}
        for row in step.rows:
            if row.sample and row.request_id not in dropped:
                try:
                    mask = self._grammars.mask(row.request_id)
                except GrammarError as error:
                    refused[row.request_id] = str(error)
                else:
                    if mask is not None:
                        masks[row.request_id] = mask
        return Late(masks, refused, dropped)

    def progress(self) -> Progress:
        """The numbers as they stand."""
        seconds, scheduler = sum(self._seconds), self._scheduler
        return Progress(
            state="draining" if self._draining or self._stopped else "ready",
            step=self._step,
            last_step=self._last_step,
            slowest=max(self._seconds, default=0.0),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + self._grammars.coming,
            usage=scheduler.usage(),
            host_share=max(0.0, 1 - sum(self._in_operators) / seconds) if seconds else 0.0,
            counters=scheduler.counters(),
        )

    def close(self) -> None:
        self._grammars.close()
