"""Schemathesis: requests made from /openapi.json, good ones and bad ones, against a running service.

Whatever comes, the status is one that the document names and the body is what it says; nothing is a 5xx. The service
has a short context, so that the tool spends its time on requests and not on answers.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.clients.service import Service, program, run_any, serving

CASES = 500
SECONDS = 900
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method", "allow_header_conformance",
)  # fmt: skip
# Paths whose every field is tried at its edges, one after the other; the drawn requests below go to all paths.
EDGES = r"^/(v1/completions|v1/models/.*|detokenize|ping|health|ready|progress|version|metrics)$"
GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def short(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Service:
    log = tmp_path_factory.mktemp("short") / "log"
    with serving(model, log, "--max-model-len", "96", "--max-running", "16") as service:
        yield service  # type: ignore[misc]


def fuzz(service: Service, folder: Path, *options: str) -> Counter[tuple[str, int]]:
    """(operation, status) -> requests of one run, which has to pass."""
    report = folder / "events.ndjson"
    command = [
        program("fuzz", "schemathesis"), "run", f"{service.address}/openapi.json", "--checks", ",".join(CHECKS),
        "--workers", "2", "--seed", "1", "--no-shrink", "--continue-on-failure", "--request-timeout", "60",
        "--suppress-health-check", "all", "--warnings", "off", "--no-color", "--report", "ndjson",
        "--report-ndjson-path", str(report), *options,
    ]  # fmt: skip
    code, out, took = run_any(command, folder, SECONDS)
    assert code == 0, f"{took:.0f} s\n{out[-12000:]}"
    seen: Counter[tuple[str, int]] = Counter()
    for line in report.read_text(encoding="utf-8").splitlines():
        recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder") or {}
        for interaction in recorder.get("interactions", {}).values():
            answer = interaction["response"]
            assert answer is not None, f"{recorder['label']}: no answer to {interaction['request']['uri']}"
            seen[recorder["label"], answer["status_code"]] += 1
    assert not [status for _, status in seen if status >= 500]
    return seen


def test_drawn_requests_get_documented_answers(short: Service, tmp_path: Path) -> None:
    seen = fuzz(short, tmp_path, "--phases", "fuzzing", "--max-examples", "52")
    assert seen.total() >= CASES, seen
    # Or the run would tell little: requests that were answered, and ones that were refused. Which path's drawn requests
    # happen to be answerable is the tool's luck.
    assert all(seen[f"POST {path}", 400] for path in GENERATE), seen
    assert sum(seen[f"POST {path}", 200] > 0 for path in GENERATE) >= 2, seen
    assert short.get("/health").status_code == 200


def test_every_field_at_its_edges(short: Service, tmp_path: Path) -> None:
    seen = fuzz(short, tmp_path, "--phases", "coverage", "--include-path-regex", EDGES)
    assert seen.total() >= CASES, seen
    assert seen["POST /v1/completions", 400] > 300 and seen["GET /ping", 405] + seen["POST /ping", 405] > 0, seen
    assert short.get("/health").status_code == 200
