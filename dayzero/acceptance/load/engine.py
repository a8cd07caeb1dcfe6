"""Requests to an engine without HTTP between: what the server itself costs is the difference."""

from __future__ import annotations

import asyncio
import time
from itertools import count

from dayzero.acceptance.load.outcome import Outcome, check_counts
from dayzero.acceptance.load.workload import LoadRequest
from dayzero.engine.api import Engine
from dayzero.engine.check import check
from dayzero.engine.request import NewRequest, SamplingParams
from dayzero.errors import UsageError, UserError


class EngineDriver:
    """Implements ``Driver`` for token-id prompts. The engine's life is the caller's. timeout: seconds a request."""

    def __init__(self, engine: Engine, timeout: float) -> None:
        self._engine, self._timeout = engine, timeout
        self._numbers = count()

    async def ask(self, request: LoadRequest, due: float | None = None) -> Outcome:
        out = Outcome(request, time.perf_counter() if due is None else due)
        try:
            async with asyncio.timeout(self._timeout):
                await self._read(request, out)
        except TimeoutError:
            out.error = ("timeout", f"no complete answer within {self._timeout:g} seconds")
        except UsageError as error:
            out.error = ("refused", str(error))
        except UserError as error:
            out.error = ("engine", str(error))
        out.ended = time.perf_counter()
        check_counts(out)
        return out

    async def _read(self, request: LoadRequest, out: Outcome) -> None:
        assert isinstance(request.prompt, list), "an engine reads token ids"
        info, asked = self._engine.info, request.output_tokens
        params = SamplingParams(temperature=0.0, max_tokens=asked, ignore_eos=True)
        params = check(params, len(request.prompt), info.max_model_len, info.vocab)
        new = NewRequest(
            id=f"bench-{next(self._numbers)}", prompt=request.prompt, params=params, arrival=time.time()
        )  # fmt: skip
        out.output_tokens, out.prompt_tokens = 0, len(request.prompt)
        async for output in self._engine.generate(new):
            if output.tokens:
                out.times.append(time.perf_counter())
            out.output_tokens += len(output.tokens)
            if output.cached is not None:
                out.cached_tokens = output.cached
            if output.finish not in (None, "length"):
                out.error = ("engine", output.error[1] if output.error else f"the answer ended with {output.finish}")

    async def close(self) -> None:
        """Nothing is held."""
