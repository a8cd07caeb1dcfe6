"""Schemathesis: requests made from /openapi.json, good ones and bad ones, against a running service.

Whatever comes, the status is one that the document names and the body is what it says; nothing is a 5xx. A short context
and few sequences keep each answer short, so that the tool spends its time on requests.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.clients.service import program, run_any, serving

CASES = 500
SECONDS = 480
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method", "allow_header_conformance",
)  # fmt: skip


def test_every_request_gets_a_documented_answer(model: Path, tmp_path: Path) -> None:
    limits = ("--max-model-len", "96", "--max-running", "16")
    with serving(model, tmp_path / "log", *limits) as service:
        command = [
            program("fuzz", "schemathesis"), "run", f"{service.address}/openapi.json", "--checks", ",".join(CHECKS),
            "--phases", "coverage,fuzzing", "--max-examples", "25", "--workers", "2", "--seed", "1", "--no-shrink",
            "--continue-on-failure", "--request-timeout", "60", "--suppress-health-check", "all", "--warnings", "off",
            "--report", "ndjson", "--report-ndjson-path", str(tmp_path / "events.ndjson"), "--no-color",
        ]  # fmt: skip
        code, out, took = run_any(command, tmp_path, SECONDS)
        statuses = counted(service.log)
    assert code == 0, f"{took:.0f} s\n{out[-12000:]}"
