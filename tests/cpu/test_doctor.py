"""``dayzero doctor`` on broken checkpoints, on servers that stop answering, and on this machine."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dayzero.acceptance.doctor.diagnosis import Diagnosis, Placed
from dayzero.acceptance.doctor.machine import Look, ask_torch
from dayzero.acceptance.doctor.service import diagnose_url
from dayzero.acceptance.doctor.source import diagnose_source
from dayzero.cli import main
from tests.cpu.cli_support import run_json
from tests.cpu.faults.catalogue import Fault, all_faults
from tests.cpu.faults.stand import Stand

GIB = 2**30
TORCH = {"torch": "2", "cuda_build": None, "available": False, "triton": None, "product": 64.0**3}
FIT = Look((3, 11), (), TORCH, compiler="c++", available_bytes=16 * GIB)
# Faults of a checkpoint's files that paper catches.
FAULTS = [one for one in all_faults() if one.run == "inspect" and one.edit and one.verdict == "fail" and not one.missed]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    return Stand(tmp_path_factory.mktemp("doctor"))


def line(placed: Placed) -> str:
    found = placed.finding
    return f"{found.kind}: {found.claim} [{found.measured}] {'; '.join(found.evidence)}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_planted_fault_is_at_the_root(stand: Stand, fault: Fault) -> None:
    """The finding that names the fault is the first cause's own, or follows from it; and there is a next command."""
    assert fault.edit is not None
    folder = stand.copy(fault.twin)
    try:
        fault.edit(folder)
        found = diagnose_source(str(folder), FIT)
    finally:
        shutil.rmtree(folder)
    assert found.verdict == "fail" and found.causes
    first = found.causes[0]
    told = [*first.found, *(one.placed for one in first.explained)]
    assert any(re.search(fault.names, line(one)) for one in told), [line(one) for one in told]
    assert found.layer in ("weights", "config", "tokenizer+template", "operator")
    assert str(folder) in first.command
    told_of = [p for cause in found.causes for p in (*cause.found, *(one.placed for one in cause.explained))]
    assert len(told_of) == sum(one.finding.verdict == "fail" for one in found.placed)


@pytest.mark.parametrize("word", ["dense", "latent", "tied"])
def test_a_sound_twin_has_nothing_at_fault(stand: Stand, word: str) -> None:
    found = diagnose_source(str(stand.twin(word)), FIT)
    assert found.layer is None and found.verdict != "fail", [line(one) for one in found.placed]


def test_a_checkpoint_that_is_larger_than_what_is_free(stand: Stand) -> None:
    found = diagnose_source(str(stand.twin("dense")), replace(FIT, available_bytes=1024))
    kinds = {one.finding.kind for one in found.causes[0].found}
    assert found.layer == "hardware" and kinds == {"machine.memory", "plan.free"}


def test_a_machine_without_torch_is_at_fault_and_paper_goes_on(stand: Stand) -> None:
    """The checkpoint is looked at all the same: that part needs no torch."""
    folder = stand.copy("dense")
    (folder / "model.safetensors").unlink(missing_ok=True)
    for shard in folder.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:100])
    found = diagnose_source(str(folder), replace(FIT, torch=None, torch_problem="ImportError: x"))
    assert [cause.gate.layer for cause in found.causes] == ["hardware", "weights"]
    assert any(one.finding.kind == "plan.made" and one.finding.verdict == "not applicable" for one in found.placed)


def _cut_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ')


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _binary_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\x00\xff" * 99)


def _empty_shard(folder: Path) -> None:
    next(folder.glob("*.safetensors")).write_bytes(b"")


def _absurd_header(folder: Path) -> None:
    next(folder.glob("*.safetensors")).write_bytes(b"\xff" * 8 + b"{}")


def _index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')


def _tokenizer_of_noise(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"{\xff")


WRECKED = {
    "a config that is cut short": (_cut_config, ("weights", "config")),
    "no config": (_no_config, ("weights", "config")),
    "a config of noise": (_binary_config, ("weights", "config")),
    "an empty shard": (_empty_shard, ("weights",)),
    "a header of absurd length": (_absurd_header, ("weights",)),
    "an index that is none": (_index_of_nothing, ("weights", "config")),
    "a tokenizer of noise": (_tokenizer_of_noise, ("tokenizer+template",)),
}


@pytest.mark.parametrize("name", WRECKED)
def test_a_wrecked_checkpoint_is_no_traceback(
    stand: Stand, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit, layers = WRECKED[name]
    folder = stand.copy("dense")
    edit(folder)
    monkeypatch.setattr("dayzero.acceptance.doctor.machine.look_here", lambda folders, port: FIT)
    code = main(["doctor", str(folder), "--json"])
    said = capsys.readouterr()
    assert "Traceback" not in said.err and "internal error" not in said.err, said.err
    told = json.loads(said.out)
    assert (code, told["verdict"]) == (1, "fail") and told["layer"] in layers and str(folder) in told["next"]


def test_what_is_no_checkpoint_is_a_wrong_call(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("dayzero.acceptance.doctor.machine.look_here", lambda folders, port: FIT)
    for target in (tmp_path / "nowhere", tmp_path):
        assert main(["doctor", str(target)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_this_machine_runs_a_model() -> None:
    """The real torch of these tests, asked as doctor asks it."""
    facts, problem = ask_torch()
    assert facts is not None and problem == "" and facts["product"] == 64.0**3
    code, told = run_json("doctor")
    assert code == 0 and told["target"] == "this machine" and told["layer"] is None
    assert {"machine.torch", "machine.packages", "machine.memory"} <= {one["kind"] for one in told["findings"]}


# --- servers ---------------------------------------------------------------------------------------------------------

Answers = Mapping[str, tuple[int, Any]]
MODELS = (200, {"data": [{"id": "nova"}]})


@contextmanager
def server(answers: Answers) -> Iterator[str]:
    """A server on loopback with canned answers by path; others are 404."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, content = answers.get(self.path, (404, {"error": {"message": "no such path"}}))
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *arguments: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


STOPS: dict[str, tuple[Answers, str]] = {
    "a key is wanted": ({"/v1/models": (401, {"error": {"message": "a key is needed"}})}, "server.key"),
    "the engine loads": ({"/v1/models": (503, {"error": {"message": "loading"}})}, "server.ready"),
    "no models": ({"/v1/models": (200, {"data": []})}, "server.models"),
    "no JSON": ({"/v1/models": (200, b"<html>")}, "server.models"),
    "models of another shape": ({"/v1/models": (200, {"data": [3, {"id": None}]})}, "server.models"),
    "an engine that died": (
        {"/v1/models": MODELS, "/v1/completions": (500, {"error": {"message": "the engine ended"}})}, "server.answers"),
    "an answer without a choice": ({"/v1/models": MODELS, "/v1/completions": (200, {"choices": []})}, "server.answers"),
    "neither way to ask": ({"/v1/models": MODELS}, "server.answers"),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_where_a_server_stops(name: str) -> None:
    answers, kind = STOPS[name]
    with server(answers) as url:
        found = diagnose_url(url, seconds=10)
    assert (found.layer, found.causes[0].first.finding.kind) == ("server", kind)
    wanted = "dayzero doctor" if kind == "server.ready" else f"dayzero accept --url {url} --stages contract"
    assert found.causes[0].command == wanted


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_server_that_answers(path: str) -> None:
    with server({"/v1/models": MODELS, path: (200, {"choices": [{"text": " four"}]})}) as url:
        found: Diagnosis = diagnose_url(url, seconds=10)
    assert found.verdict == "pass" and found.layer is None


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with server({}) as url:
        pass
    assert main(["doctor", url, "--quiet"]) == 1
    assert capsys.readouterr().out == "at fault: server; next: dayzero doctor\n"


def test_another_machine_is_asked_only_by_leave(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "http://192.0.2.1:8000"]) == 2
    assert "--allow-remote" in capsys.readouterr().err
