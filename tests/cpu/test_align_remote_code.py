"""A checkpoint that ships its own code: it runs when the user says so and never before, and the record names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from align_support import write_dense, write_recipe

from dayzero.acceptance.align import AlignOptions, align_source
from dayzero.errors import UsageError

CONFIGURATION = """
from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, **more):
        super().__init__(**more)
"""

# An architecture of its own file and names: grouped attention with rotated halves, gated channels, plain residual.
MODELING = """
import pathlib
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig

pathlib.Path({mark!r}).write_text("ran")


class Scale(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt())


class Angles(nn.Module):
    def __init__(self, width, theta):
        super().__init__()
        steps = torch.arange(0, width, 2, dtype=torch.float32)
        self.register_buffer("rates", theta ** (-steps / width), persistent=False)

    def forward(self, length):
        turn = torch.arange(length, dtype=torch.float32)[:, None] * self.rates
        turn = torch.cat((turn, turn), -1)
        return turn.cos(), turn.sin()


def rotate(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Look(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.groups, self.width = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.groups * self.width, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.groups * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, c.hidden_size, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, n, self.width).transpose(1, 2)
            for p, n in ((self.q_proj, self.heads), (self.k_proj, self.groups), (self.v_proj, self.groups))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * self.width**-0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(batch, length, -1))


class Think(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = Scale(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Scale(c.hidden_size, c.rms_norm_eps)
        self.self_attn, self.mlp = Look(c), Think(c)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class OwnPreTrainedModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"

    def _init_weights(self, module):
        pass


class OwnModel(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = Scale(config.hidden_size, config.rms_norm_eps)
        self.angles = Angles(config.head_dim, config.rope_theta)
        self.post_init()

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        cos, sin = self.angles(input_ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class OwnForCausalLM(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, use_cache=None):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))
"""
RECIPE = """
ARCHITECTURES = ("OwnForCausalLM",)
MODEL_TYPES = ("own",)
ORACLE = {oracle}
"""
CONFIG = {
    "architectures": ["OwnForCausalLM"], "model_type": "own",
    "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
}  # fmt: skip


class Release:
    """folder of the checkpoint, its recipe, and the file that its code would write."""

    def __init__(self, root: Path, oracle: str = "None", wrong: tuple[str, str] | None = None) -> None:
        self.mark = root / "ran"
        self.folder = write_dense(root / "m", CONFIG)
        text = MODELING.replace("{mark!r}", repr(str(self.mark)))
        if wrong is not None:
            assert wrong[0] in text
            text = text.replace(*wrong)
        (self.folder / "modeling_own.py").write_text(text)
        (self.folder / "configuration_own.py").write_text(CONFIGURATION)
        self.recipe = write_recipe(root / "own.py", RECIPE.format(oracle=oracle))

    def options(self, **more: Any) -> AlignOptions:
        return AlignOptions(recipe=self.recipe, threads=1, num_tokens=20, **more)


@pytest.mark.parametrize("oracle", ["None", "Oracle(head='lm_head')"])
def test_without_the_flag_the_code_never_runs(oracle: str, tmp_path: Path) -> None:
    """Neither when the recipe names nothing, nor when it only says where the modules of such code are."""
    made = Release(tmp_path, oracle)
    with pytest.raises(UsageError, match=r"--oracle FILE\.py .*--trace FILE .*--allow-remote-code"):
        align_source(str(made.folder), made.options())
    with pytest.raises(UsageError, match=r"runs Python code from the checkpoint; allow it with --allow-remote-code"):
        align_source(str(made.folder), made.options(oracle="remote"))
    assert not made.mark.exists()


def test_code_that_is_named_and_not_there_is_not_offered(tmp_path: Path) -> None:
    made = Release(tmp_path, "None")
    (made.folder / "modeling_own.py").unlink()
    with pytest.raises(UsageError, match=r"names no oracle .*--trace FILE \(recorded elsewhere\)\.$"):
        align_source(str(made.folder), made.options(allow_remote_code=True))
    with pytest.raises(UsageError, match=r"auto_map names modeling_own\.py, which is not there"):
        align_source(str(made.folder), made.options(allow_remote_code=True, oracle="remote"))


def test_with_the_flag_the_checkpoints_code_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HOME", str(cache))
    made = Release(tmp_path, "Oracle(head='lm_head')")
    report = align_source(str(made.folder), made.options(allow_remote_code=True))
    assert made.mark.exists() and report.verdict == "pass" and report.first_diverging is None
    assert (report.oracle["kind"], report.oracle["name"]) == ("remote code", "OwnForCausalLM")
    versions = report.oracle["versions"]
    assert versions["modeling_own.py"].startswith("sha256:") and "configuration_own.py" in versions
    scope = next(f for f in report.findings if f.kind == "align.scope")
    assert "remote code OwnForCausalLM" in scope.claim and any("modeling_own.py" in e for e in scope.evidence)
    assert not list(cache.rglob("modeling_own*")), "no copy of it stays in the user's cache"
    assert not list(made.folder.rglob("__pycache__"))


def test_code_that_computes_something_else_is_seen(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    made = Release(tmp_path, wrong=("torch.cat((-high, low), -1)", "torch.cat((high, -low), -1)"))
    report = align_source(str(made.folder), made.options(oracle="remote", allow_remote_code=True))
    assert json.loads(json.dumps(report.to_json()))["first_diverging"] == "layers.0.mixer"
