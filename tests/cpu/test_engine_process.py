"""The engine in a process of its own: whatever happens to it, every request ends once and nothing hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from dayzero.engine.client import AsyncEngine
from dayzero.engine.events import Drain, Fatal, FromEngine, Output, Ready
from dayzero.engine.request import Grammar, NewRequest, SamplingParams
from dayzero.engine.wire import Frames, encode
from dayzero.engine.worker import serve
from dayzero.errors import CheckpointError, EngineDead, ModelError, Overloaded
from tests.paper.fake_engine import DEFAULT, STOP, WORKER, FakeExecutor, Habits, answer, fake_launch
from tests.paper.small_tokenizer import small_tokenizer, small_tokenizer_json

SLOW = Habits(step_seconds=0.02)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """With a limit, as a test that hangs tells nothing."""
    asyncio.run(asyncio.wait_for(test(), 60))


@asynccontextmanager
async def engine(
    folder: Path, habits: Habits = DEFAULT, stall_seconds: float = 10.0, **config: object
) -> AsyncIterator[AsyncEngine]:
    one = AsyncEngine(fake_launch(folder, habits, **config), stall_seconds=stall_seconds, worker=WORKER)
    await one.start()
    try:
        await one.wait_ready()
        yield one
    finally:
        await one.close()


def request(name: str, prompt: list[int] | None = None, **params: object) -> NewRequest:
    params = {"max_tokens": 8, "ignore_eos": prompt is None, **params}
    return NewRequest(id=name, prompt=prompt or [5, 6, 7], params=SamplingParams(**params))  # type: ignore[arg-type]


async def ask(one: AsyncEngine, asked: NewRequest) -> tuple[list[int], Output]:
    tokens: list[int] = []
    last = None
    async for output in one.generate(asked):
        assert last is None
        tokens += output.tokens
        last = output if output.finish is not None else None
    assert last is not None
    return tokens, last


async def until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} seconds"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_answers_come_through_the_process_as_they_are(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", max_running=4) as one:
            assert one.info.family == "fake" and one.info.stop_ids == [STOP]
            prompts = [[n + 2] * (n * 9 + 1) for n in range(12)]
            found = await asyncio.gather(*(ask(one, request(f"r{n}", p, max_tokens=30)) for n, p in enumerate(prompts)))
            assert [(tokens, last.finish) for tokens, last in found] == [answer(p, 30) for p in prompts]
            status = one.status()
            assert status.state == "ready" and not status.stalled and status.since_step == 0 and status.died == 0
            assert status.progress is not None and status.progress.counters["generated_tokens"] >= 12
            pid = one.pid
        assert pid is not None and gone(pid)
        assert one.status().state == "dead" and one.pid is None

    run(test)


def test_a_killed_process_fails_what_runs_and_comes_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", SLOW) as one:
            tasks = [asyncio.create_task(ask(one, request(f"r{n}", max_tokens=2000))) for n in range(5)]
            await until(lambda: one.status().progress is not None and one.status().progress.running == 5, 5)  # type: ignore[union-attr]
            assert one.pid is not None
            os.kill(one.pid, signal.SIGKILL)
            killed = time.monotonic()
            found = await asyncio.gather(*tasks)
            assert time.monotonic() - killed < 2
            for _, last in found:
                assert last.finish == "error" and last.error is not None and last.error[0] == "engine_died"
                assert "SIGKILL" in last.error[1]
            assert one.status().state == "restarting" and "SIGKILL" in one.status().why
            with pytest.raises(EngineDead, match="started again"):
                one.generate(request("between"))
            await one.wait_ready()
            assert one.status().state == "ready" and one.status().died == 1
            assert (await ask(one, request("after", [9, 9])))[0] == answer([9, 9], 8)[0]

    run(test)


def test_signals_that_a_supervisor_sends_to_all_processes_leave_it_to_its_parent(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", SLOW) as one:
            task = asyncio.create_task(ask(one, request("a", max_tokens=20)))
            await asyncio.sleep(0.1)
            assert one.pid is not None
            os.kill(one.pid, signal.SIGTERM)
            os.kill(one.pid, signal.SIGINT)
            assert (await task)[1].finish == "length" and one.status().died == 0

    run(test)


def test_a_frozen_process_counts_as_stalled_until_it_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", SLOW, stall_seconds=0.3) as one:
            assert one.pid is not None
            os.kill(one.pid, signal.SIGSTOP)
            await asyncio.sleep(0.5)
            assert not one.status().stalled  # nothing is asked of it
            task = asyncio.create_task(ask(one, request("a")))
            await asyncio.sleep(0.1)
            assert not one.status().stalled
            await until(lambda: one.status().stalled, 2)
            assert one.status().state == "ready" and "no step has ended" in one.status().why
            os.kill(one.pid, signal.SIGCONT)
            assert (await task)[1].finish == "length"
            assert not one.status().stalled

    run(test)


def test_a_step_that_raises_ends_the_process_with_its_sentence(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", Habits(fail_at=3)) as one:
            _, last = await ask(one, request("a"))
            assert last.error == ("engine_died", "internal error: ArithmeticError: the device fell off the bus")

    run(test)


def test_it_gives_up_when_it_dies_again_and_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", Habits(works_once=True)) as one:
            assert one.pid is not None
            os.kill(one.pid, signal.SIGKILL)
            await until(lambda: one.status().state == "dead", 20)
            assert one.status().died == 5 and "SIGKILL" in one.status().why
            with pytest.raises(EngineDead, match="there is no engine"):
                one.generate(request("a"))
            with pytest.raises(EngineDead):
                await one.wait_ready()

    run(test)


@pytest.mark.parametrize(
    ("load", "kind", "said"),
    [
        ("refuse", ModelError, "lacks its last 8 bytes"),
        ("bug", RuntimeError, "internal error: KeyError"),
        ("die", EngineDead, "ended by SIGKILL"),
    ],
)
def test_a_load_that_fails_is_told_as_it_failed(tmp_path: Path, load: str, kind: type[Exception], said: str) -> None:
    async def test() -> None:
        one = AsyncEngine(fake_launch(tmp_path / "m", Habits(load=load)), worker=WORKER)
        await one.start()
        with pytest.raises(kind, match=said) as told:
            await one.wait_ready()
        assert getattr(told.value, "exit_code", 70) == {"refuse": CheckpointError.exit_code, "die": 3}.get(load, 70)
        assert one.status().state == "dead"
        await one.close()
        assert len((tmp_path / "m" / "loads").read_text().splitlines()) == 1

    run(test)


def test_a_worker_that_cannot_start_is_no_hang(tmp_path: Path) -> None:
    async def test() -> None:
        one = AsyncEngine(fake_launch(tmp_path / "m"), worker=("/bin/sh", "-c", "exit 7"))
        await one.start()
        with pytest.raises(EngineDead, match="exit code 7"):
            await one.wait_ready()
        await one.close()

    run(test)


def test_a_supervisor_that_is_cancelled_leaves_nobody_waiting(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", SLOW) as one:
            task = asyncio.create_task(ask(one, request("a", max_tokens=2000)))
            await asyncio.sleep(0.1)
            pid = one.pid
            assert pid is not None
            (supervisor,) = [t for t in asyncio.all_tasks() if t.get_name() == "engine-supervisor"]
            supervisor.cancel()
            assert (await task)[1].error is not None
            assert one.status().state == "dead"
            await until(lambda: gone(pid), 2)

    run(test)


def test_a_command_that_does_not_exist_is_an_error_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        one = AsyncEngine(fake_launch(tmp_path / "m"), worker=(str(tmp_path / "nothing"),))
        with pytest.raises(FileNotFoundError):
            await one.start()
        await one.close()

    run(test)


def test_loading_is_told_and_can_be_broken_off(tmp_path: Path) -> None:
    async def test() -> None:
        one = AsyncEngine(fake_launch(tmp_path / "m", Habits(load_seconds=30)), worker=WORKER)
        await one.start()
        assert one.status().state == "loading"
        with pytest.raises(EngineDead, match="still loading"):
            one.generate(request("a"))
        quick = AsyncEngine(fake_launch(tmp_path / "q", Habits(load_seconds=0.5)), worker=WORKER)
        await quick.start()
        await until(lambda: (p := quick.status().progress) is not None and 0 < p.loaded <= p.to_load == 500, 10)
        await quick.close()
        pid = one.pid
        began = time.monotonic()
        await one.close()
        assert time.monotonic() - began < 2 and pid is not None and gone(pid)

    run(test)


def test_leaving_early_and_abort_end_requests(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", SLOW) as one:
            async with aclosing(one.generate(request("left", max_tokens=2000))) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    assert output.tokens
                    break
            task = asyncio.create_task(ask(one, request("aborted", max_tokens=2000)))
            cancelled = asyncio.create_task(ask(one, request("cancelled", max_tokens=2000)))
            await asyncio.sleep(0.2)
            await one.abort("aborted")
            await one.abort("nobody")
            assert (await task)[1].finish == "abort"
            cancelled.cancel()
            with suppress(asyncio.CancelledError):
                await cancelled
            await ask(one, request("last"))
            progress = one.status().progress
            assert progress is not None and progress.counters["aborted"] == 3 and progress.running == 0

    run(test)


def test_a_storm_of_aborts_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", Habits(step_seconds=0.001), max_running=8) as one:

            async def leave(number: int) -> None:
                count = 0
                async with aclosing(one.generate(request(f"r{number}", max_tokens=60))) as outputs:  # type: ignore[type-var]
                    async for _ in outputs:
                        count += 1
                        if count > number % 7:
                            break

            async def cut(number: int) -> None:
                task = asyncio.create_task(ask(one, request(f"c{number}", [number + 2] * 70, max_tokens=60)))
                await asyncio.sleep(0.002 * (number % 11))
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

            await asyncio.gather(*(f(n) for n in range(60) for f in (leave, cut)))
            assert (await ask(one, request("last", [4, 4])))[0] == answer([4, 4], 8)[0]
            progress = one.status().progress
            assert progress is not None and progress.running == progress.waiting == 0
            assert one.status().since_step == 0

    run(test)


def test_overload_is_refused_and_passes(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", SLOW, max_running=2, max_waiting=3) as one:
            tasks = [asyncio.create_task(ask(one, request(f"r{n}", max_tokens=20))) for n in range(5)]
            await asyncio.sleep(0.1)
            with pytest.raises(Overloaded, match="3 requests are waiting"):
                one.generate(request("more"))
            for _, last in await asyncio.gather(*tasks):
                assert last.finish == "length"
            assert (await ask(one, request("again")))[1].finish == "length"

    run(test)


def test_a_slow_reader_gets_everything_and_holds_nobody_up(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m") as one:
            outputs = one.generate(request("slow", max_tokens=500, logprobs=2))
            first = await anext(outputs)
            assert (await ask(one, request("quick", max_tokens=400)))[1].finish == "length"
            await asyncio.sleep(0.3)
            rest = [output async for output in outputs]
            assert len(rest) < 5 and rest[-1].finish == "length"  # merged, not queued one by one
            tokens = [t for output in [first, *rest] for t in output.tokens]
            logs = [item.token for output in [first, *rest] for item in output.logprobs]
            assert len(tokens) == 500 and logs == tokens
            assert set(rest[-1].times) >= {"arrival", "finished"}

    run(test)


def test_a_reader_that_sleeps_for_good_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dayzero.engine.client.MAX_UNREAD", 50)

    async def test() -> None:
        async with engine(tmp_path / "m") as one:
            outputs = one.generate(request("asleep", max_tokens=2000))
            await anext(outputs)
            assert (await ask(one, request("quick", max_tokens=400)))[1].finish == "length"
            rest = [output async for output in outputs]
            assert [o.error and o.error[0] for o in rest] == ["overloaded"]
            await ask(one, request("last"))
            assert one.status().progress.running == 0  # type: ignore[union-attr]

    run(test)


def test_drain_lets_the_accepted_ones_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", SLOW, max_running=2) as one:
            tasks = [asyncio.create_task(ask(one, request(f"r{n}", max_tokens=10))) for n in range(4)]
            await asyncio.sleep(0.1)
            pid = one.pid
            draining = asyncio.create_task(one.drain(20))
            await asyncio.sleep(0)
            assert one.status().state == "draining"
            with pytest.raises(EngineDead, match="shut down"):
                one.generate(request("late"))
            assert [last.finish for _, last in await asyncio.gather(*tasks)] == ["length"] * 4
            assert await draining
            assert one.status().state == "dead" and pid is not None and gone(pid)

    run(test)


def test_drain_has_a_limit(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m", SLOW) as one:
            task = asyncio.create_task(ask(one, request("a", max_tokens=3000)))
            await asyncio.sleep(0.1)
            assert not await one.drain(0.2)
            assert (await task)[1].finish == "abort"

    run(test)


def test_close_ends_a_frozen_process_and_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dayzero.engine.client.STOP_SECONDS", 0.3)

    async def test() -> None:
        async with engine(tmp_path / "m", SLOW) as one:
            task = asyncio.create_task(ask(one, request("a", max_tokens=3000)))
            await asyncio.sleep(0.1)
            pid = one.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await one.close()
            assert gone(pid)
            assert (await task)[1].error is not None
            await one.close()

    run(test)


def test_a_killed_parent_leaves_no_orphan(tmp_path: Path) -> None:
    launch = fake_launch(tmp_path / "m", Habits(load_seconds=0.2))
    program = (
        "import asyncio, sys, msgspec\n"
        "from dayzero.engine.client import AsyncEngine\n"
        "from dayzero.engine.launch import LaunchSpec\n"
        "async def main():\n"
        "    one = AsyncEngine(msgspec.json.decode(sys.argv[1], type=LaunchSpec), worker=sys.argv[2:])\n"
        "    await one.start()\n"
        "    await one.wait_ready()\n"
        "    print(one.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, msgspec.json.encode(launch).decode(), *WORKER]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    while not gone(pid):
        assert time.monotonic() < end, "the engine process has outlived its parent"
        time.sleep(0.01)


def test_grammars_hold_across_the_process(tmp_path: Path) -> None:
    async def test() -> None:
        launch = fake_launch(tmp_path / "m")
        (tmp_path / "m" / "tokenizer.json").write_text(small_tokenizer_json())
        one = AsyncEngine(launch, worker=WORKER)
        await one.start()
        await one.wait_ready()
        good = Grammar(kind="regex", text='the "[ab]{3}"')
        bad = Grammar(kind="json_schema", text='{"type":"foo"}')
        found = await asyncio.gather(
            ask(one, request("good", [5, 6], max_tokens=40, grammar=good)),
            ask(one, request("bad", [5, 6], grammar=bad)),
            ask(one, request("free", [5, 6])),
        )
        await one.close()
        text = small_tokenizer().decode(found[0][0])
        assert found[0][1].finish == "stop" and text[:5] == 'the "' and set(text[5:8]) <= {"a", "b"} and text[8:] == '"'
        assert found[1][1].error is not None and found[1][1].error[0] == "grammar" and "foo" in found[1][1].error[1]
        assert found[2][0] == answer([5, 6], 8)[0]

    run(test)


NONSENSE = ["raise SystemExit(0)", "s.send(b'\\xff' * 64); s.recv(1 << 20); s.recv(1)", "s.send(b'\\x09\\0\\0\\0x')"]


@pytest.mark.parametrize("said", NONSENSE)
def test_a_worker_that_talks_nonsense_is_ended(tmp_path: Path, said: str) -> None:
    program = f"import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\n{said}\n"

    async def test() -> None:
        one = AsyncEngine(fake_launch(tmp_path / "m"), worker=(sys.executable, "-c", program))
        await one.start()
        with pytest.raises(EngineDead, match="the engine process (ended|was ended because it sent what is no message)"):
            await one.wait_ready()
        await one.close()

    run(test)


def test_an_idle_process_costs_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path / "m") as one:
            await ask(one, request("a"))
            process = psutil.Process(one.pid)
            before = sum(process.cpu_times()[:2])
            await asyncio.sleep(1)
            assert sum(process.cpu_times()[:2]) - before <= 0.05

    run(test)


def served(folder: Path, *data: bytes) -> tuple[int, list[FromEngine]]:
    """What a worker that is sent ``data`` and then nothing more says, and its exit code."""
    ours, theirs = socket.socketpair()
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(serve(theirs, FakeExecutor)))
    thread.start()
    for piece in data:
        ours.sendall(piece)
        time.sleep(0.05)
    ours.shutdown(socket.SHUT_WR)
    thread.join(10)
    assert codes, "the worker hangs"
    theirs.close()
    frames: Frames[FromEngine] = Frames(FromEngine)
    with ours:
        said = [message for piece in iter(lambda: ours.recv(1 << 16), b"") for message in frames.feed(piece)]
    return codes[0], said


LENGTH = (99).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"", 0, None),
        (LENGTH, 70, "4 bytes into a frame"),
        (b"\xff" * 4, 70, "a frame claims 4294967295 bytes"),
        (LENGTH + b"\xc1" * 99, 70, "a frame of 99 bytes is no message"),
        (encode(Drain()), 70, "the first message is a Drain"),
    ],
)
def test_a_worker_that_is_sent_nonsense_says_so_and_ends(tmp_path: Path, data: bytes, code: int, said: str) -> None:
    for start in (b"", encode(fake_launch(tmp_path / "m"))):
        if start and code and "first message" in said:
            continue
        found, messages = served(tmp_path, start, data) if start else served(tmp_path, data)
        assert found == code
        fatal = [message for message in messages if isinstance(message, Fatal)]
        assert [(one.code, said in one.text, "\n" in one.text) for one in fatal] == [(70, True, False)] * bool(code)
        assert bool(start) == any(isinstance(message, Ready) for message in messages)
