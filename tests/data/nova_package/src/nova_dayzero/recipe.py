"""Nova: windowed means and grouped-query attention in turn, squared-ReLU channels, plain residual. No torch."""

from __future__ import annotations

from pathlib import Path

from dayzero.arch.mixers import Attention
from dayzero.arch.norms import Norm
from dayzero.arch.raw import Raw
from dayzero.arch.residuals import Plain
from dayzero.arch.rope import Rope
from dayzero.arch.spec import LayerSpec, ModelSpec
from dayzero.checkpoint.rules import Beside, Rule
from dayzero.models import common
from dayzero.models.recipe import Oracle, Traits
from nova_dayzero.specs import MeanWindow, Squared

NAME = "nova"
ARCHITECTURES = ("NovaForCausalLM",)
TRAITS = Traits(needs=("mean_window", "mean_width"))
ORACLE = Oracle(file=str(Path(__file__).with_name("plain_forward.py")))


def spec(raw: Raw) -> ModelSpec:
    dim, heads, head_dim = raw.int("hidden_size", least=1), raw.int("num_attention_heads"), raw.int("head_dim")
    norm = Norm(dim, raw.float("rms_norm_eps"))
    rope = Rope(head_dim, raw.float("rope_theta"))
    full = Attention(dim, heads, raw.int("num_key_value_heads"), head_dim, rope, head_dim**-0.5)
    mean = MeanWindow(dim, raw.int("mean_width", least=1), raw.int("mean_window", least=1))
    channel = Squared(dim, raw.int("intermediate_size", least=1))
    layers = [
        LayerSpec(full if i % 2 else mean, channel, Plain(norm)) for i in range(raw.int("num_hidden_layers", least=1))
    ]
    return common.assemble(NAME, raw, None, layers, raw.int("max_position_embeddings", least=1))


LAYER = "model.layers.{i}."
RULES = (
    *common.frame_rules(),
    Beside("layers.{i}.mixer.q", common.attention_rules(LAYER + "self_attn.")),
    Beside(
        "layers.{i}.mixer.gate",
        tuple(Rule(f"{LAYER}mean.{n}.weight", f"layers.{{i}}.mixer.{n}") for n in ("v", "gate", "o")),
    ),
    *(Rule(f"{LAYER}mlp.{n}.weight", f"layers.{{i}}.channel.{n}") for n in ("up", "down")),
)
TWIN = common.twin(
    {
        "hidden_size": 48, "num_hidden_layers": 4, "vocab_size": 300, "max_position_embeddings": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "mean_width": 40, "mean_window": 6,
        "intermediate_size": 56,
    }
)  # fmt: skip
