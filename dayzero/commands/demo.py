"""``dayzero demo``: the whole ladder on a small real model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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
class Question:
    """title: as it is shown; text: what the model gets, behind the picture if there is one."""

    title: str
    text: str
    picture: Path | None = None


@dataclass(frozen=True, slots=True)
class DemoOptions:
    where: Annotated[bool, typer.Option("--where", help="Print the small model's folder and stop.")] = False
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="rehearsal, in the package; another, fetched once (93 MB): a wrong name lists it."
        ),
    ] = "rehearsal"
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ask this at the end, in place of what the demo asks.")
    ] = None
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer, in tokens.")] = 64


def run(options: DemoOptions, console: Console) -> int:
    """Run every step on a small real model.

    It is inspected, planned, aligned with a plain forward or the publisher's code, and asked on the CPU. The rehearsal
    model is part of the package and needs no network; it finds a number in a text and names what a picture shows.
    """
    from dayzero.demo import folder_of

    folder = str(folder_of(options.model, console.progress))
    if options.where:
        console.result(folder)
        console.emit_json({"folder": folder})
        return 0
    return _ladder(options, folder, console)


def _questions(options: DemoOptions) -> list[Question]:
    from dayzero.acceptance.prompt import TEXT
    from dayzero.demo import PICTURE

    if options.prompt is not None:
        return [Question(options.prompt, options.prompt)]
    if options.model != "rehearsal":
        return [Question(PROMPT, PROMPT)]
    words = TEXT.read_text(encoding="utf-8").split()
    hidden, asked = "The secret number of Lisbon is 48213.", "What is the secret number of Lisbon?"
    filled = " ".join([*words[: len(words) // 3], hidden, *words[len(words) // 3 :]])
    said = f"{hidden[:-1]}, among {len(words)} words of Genesis. {asked}"
    return [
        Question(said, f"{filled} {asked}"),
        Question(f"What is in {PICTURE.name}?", "What is in the picture?", PICTURE),
    ]


def _ladder(options: DemoOptions, folder: str, console: Console) -> int:
    from dayzero.planner.plan_show import show_plan
    from dayzero.planner.show import show_report

    questions = _questions(options)
    console.line(f"model: {folder}; {3 + len(questions)} steps")
    console.line("\n1. inspect", "bold")
    inspected = inspect_report(InspectOptions(folder), console)
    show_report(inspected, console)
    console.line("\n2. plan on this CPU", "bold")
    planned = plan_report(PlanArguments(folder, "here"), console)
    show_plan(planned, console)
    console.line("\n3. align with an independent forward", "bold")
    aligned = align_report(AlignArguments(folder), console)
    from dayzero.acceptance.align import show_align

    show_align(aligned, console)
    verdicts: tuple[Verdict, ...] = (inspected.verdict, planned.verdict, aligned.verdict)
    said = _answers(folder, questions, options.tokens, console)
    steps = zip(("inspect", "plan", "align"), verdicts, strict=True)
    console.stream("\n\ndemo: " + ", ".join(f"{command} {verdict}" for command, verdict in steps) + "\n")
    answers = [{"question": question.title, "answer": one} for question, one in zip(questions, said, strict=True)]
    console.emit_json({"folder": folder, "inspect": inspected, "plan": planned, "align": aligned, "answers": answers})
    return max(exit_code(verdict) for verdict in verdicts)


def _answers(folder: str, questions: list[Question], tokens: int, console: Console) -> list[str]:
    """One greedy turn of a chat for each, shown as it comes. Errors: see ``RequestOutput.raise_error``."""
    from dayzero.chat.pieces import Content
    from dayzero.engine.answer import ChatOutput
    from dayzero.engine.llm import LLM
    from dayzero.engine.request import SamplingParams

    params, answers = SamplingParams(temperature=0, max_tokens=tokens), []
    with console.progress("reading weights", None, "B") as bar:
        llm = LLM(folder, progress=lambda done, total: bar.reach(done, total), pool_bytes=POOL_BYTES, max_running=1)
    with llm:
        for number, question in enumerate(questions, 4):
            console.stream("\n" * (number > 4))  # behind the last answer, which is shown even when quiet
            console.line(f"\n{number}. answer: {question.title}", "bold")
            shown = [{"image": question.picture}] if question.picture is not None else []
            said = []
            for piece in llm.stream_chat([{"role": "user", "content": [*shown, question.text]}], params):
                if isinstance(piece, Content):
                    console.stream(piece.text)
                    said.append(piece.text)
                elif isinstance(piece, ChatOutput):
                    piece.output.raise_error()
            answers.append("".join(said))
    return answers
