"""``dayzero demo``: the whole ladder on a small real model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from dayzero.commands.align import AlignArguments
from dayzero.commands.align import report_of as align_report
from dayzero.commands.frame import exit_code
from dayzero.commands.inspect import InspectOptions
from dayzero.commands.inspect import report_of as inspect_report
from dayzero.commands.plan import PlanArguments
from dayzero.commands.plan import report_of as plan_report
from dayzero.console import Console
from dayzero.finding import Verdict

PROMPT = "What is the capital of France?"
POOL_BYTES = 64 << 20  # one short conversation


@dataclass(frozen=True, slots=True)
class DemoOptions:
    where: Annotated[bool, typer.Option("--where", help="Print the small model's folder and stop.")] = False
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The question to answer at the end.")] = PROMPT
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer, in tokens.")] = 64


def run(options: DemoOptions, console: Console) -> int:
    """Run every step on a small real model.

    It is fetched once, then inspected, planned, aligned with the publisher's code, and asked one question on the CPU.
    """
    from dayzero.demo import demo_folder

    folder = str(demo_folder(console.progress))
    if options.where:
        console.result(folder)
        console.emit_json({"folder": folder})
        return 0
    return _ladder(options, folder, console)


def _ladder(options: DemoOptions, folder: str, console: Console) -> int:
    from dayzero.planner.plan_show import show_plan
    from dayzero.planner.show import show_report

    console.line(f"model: {folder}; four steps, a few minutes in all, most of it for step 3")
    console.line("\n1. inspect", "bold")
    inspected = inspect_report(InspectOptions(folder), console)
    show_report(inspected, console)
    console.line("\n2. plan on this CPU", "bold")
    planned = plan_report(PlanArguments(folder, "here"), console)
    show_plan(planned, console)
    console.line("\n3. align with the publisher's code", "bold")
    aligned = align_report(AlignArguments(folder), console)
    from dayzero.acceptance.align import show_align

    show_align(aligned, console)
    verdicts: tuple[Verdict, ...] = (inspected.verdict, planned.verdict, aligned.verdict)
    console.line(f"\n4. answer: {options.prompt}", "bold")
    answer = _answer(folder, options, console)
    said = zip(("inspect", "plan", "align"), verdicts, strict=True)
    console.stream("\n\ndemo: " + ", ".join(f"{command} {verdict}" for command, verdict in said) + "\n")
    console.emit_json({"folder": folder, "inspect": inspected, "plan": planned, "align": aligned, "answer": answer})
    return max(exit_code(verdict) for verdict in verdicts)


def _answer(folder: str, options: DemoOptions, console: Console) -> str:
    """One greedy turn of a chat, shown as it comes. Errors: see ``RequestOutput.raise_error``."""
    from dayzero.chat.pieces import Content
    from dayzero.engine.answer import ChatOutput
    from dayzero.engine.llm import LLM
    from dayzero.engine.request import SamplingParams

    with console.progress("reading weights", None, "B") as bar:
        llm = LLM(folder, progress=lambda done, total: bar.reach(done, total), pool_bytes=POOL_BYTES, max_running=1)
    with llm:
        params, said = SamplingParams(temperature=0, max_tokens=options.tokens), []
        for piece in llm.stream_chat([{"role": "user", "content": options.prompt}], params):
            if isinstance(piece, Content):
                console.stream(piece.text)
                said.append(piece.text)
            elif isinstance(piece, ChatOutput):
                piece.output.raise_error()
    return "".join(said)
