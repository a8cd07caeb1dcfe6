"""What stops the oracle's process is one sentence that names the file or tensor, with the right kind of error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dayzero.acceptance.oracle import Chosen, _run
from dayzero.console import no_progress
from dayzero.errors import CheckpointError, MachineError, ModelError
from dayzero.models.recipe import Oracle
from dayzero.oracles.decode import open_checkpoint
from tests.paper.files import write_safetensors


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (
            "raise FileNotFoundError(2, 'No such file or directory', '/x/model-00002.safetensors')",
            CheckpointError,
            r"^model-00002\.safetensors disappeared while the oracle read it",
        ),
        (
            "raise ValueError('a.weight_scale_inv in m.safetensors: a scale is NaN or infinite')",
            CheckpointError,
            r"^a\.weight_scale_inv in m\.safetensors: a scale is NaN or infinite; the file is damaged",
        ),
        ("import nothing_of_this_name", MachineError, r"dayzero\[oracle\]"),
        ("raise RuntimeError('odd')", ModelError, r"stopped: RuntimeError: odd\. Its log is "),
    ],
)
def test_a_stopped_oracle_is_one_sentence(tmp_path: Path, code: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        _run([sys.executable, "-c", code], Chosen("library", "Test", Oracle()), 1, no_progress, tmp_path / "log")
    kept = str(caught.value).rsplit(" ", 1)[-1].rstrip(".")
    if kept.endswith(".log"):
        Path(kept).unlink()


def test_a_nan_scale_names_its_tensor_and_file(tmp_path: Path) -> None:
    scale = torch.tensor([[float("nan")]])
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "a.weight": ("F8_E4M3", (4, 4), bytes(16)),
            "a.weight_scale_inv": ("F32", (1, 1), scale.numpy().tobytes()),
        },
    )
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [128, 128]}}')
    with pytest.raises(ValueError, match=r"a\.weight_scale_inv in model\.safetensors: a scale is NaN"):
        open_checkpoint(tmp_path).tensor("a.weight")
