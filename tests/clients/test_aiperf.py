"""aiperf, a load generator, for half a minute: no request fails, and what it counts is what the service counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.clients.service import NAME, Service, program, run
from tests.clients.small_model import MARKERS

LOAD_SECONDS = 30
SECONDS = 400
INPUT, OUTPUT = 64, 16  # tokens asked for; the chat template adds some to the input
USAGE = {"total_isl": "prompt_tokens", "total_osl": "generation_tokens"}


def number(report: dict[str, Any], name: str, statistic: str = "avg") -> float:
    return float(report[name][statistic])


def test_half_a_minute_of_load(service: Service, tmp_path: Path) -> None:
    before = {name: service.total(f"vllm:{name}") for name in ("prompt_tokens", "generation_tokens")}
    taken = service.total("vllm:request_success", finished_reason="length")
    # A model that draws a marker by chance would give an answer without any text, which this tool counts as an error.
    markers = service.ids("".join(MARKERS))
    extra = {"ignore_eos": True, "logit_bias": {str(token): -100 for token in markers}}
    command = [
        program("load", "aiperf"), "profile", "--model", NAME, "--url", service.address, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", str(service.folder), "--isl", str(INPUT), "--osl", str(OUTPUT),
        "--extra-inputs", json.dumps(extra), "--concurrency", "4", "--benchmark-duration", str(LOAD_SECONDS),
        "--benchmark-grace-period", "60", "--use-server-token-count", "--random-seed", "1", "--ui", "none",
        "--artifact-dir", str(tmp_path / "out"),
    ]  # fmt: skip
    # With HF_HUB_OFFLINE a folder is taken for the name of a repository.
    out = run(command, tmp_path, SECONDS, HF_HUB_OFFLINE=None, TRANSFORMERS_OFFLINE=None)
    (file,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    report = json.loads(file.read_text(encoding="utf-8"))
    assert not report.get("was_cancelled"), out[-3000:]
    assert not report.get("error_summary"), report["error_summary"]
    count = number(report, "request_count")
    assert count >= 8
    assert service.total("vllm:request_success", finished_reason="length") - taken == count
    for name, counter in USAGE.items():
        assert number(report, name) == service.total(f"vllm:{counter}") - before[counter], name
    assert number(report, "output_sequence_length", "min") == number(report, "output_sequence_length", "max") == OUTPUT
    assert number(report, "time_to_first_token", "min") > 0
