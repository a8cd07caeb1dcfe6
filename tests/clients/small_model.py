"""The model that real clients talk to: a seeded twin with a vocabulary, a chat template and tools, made in a second.

Its weights are random, so an answer says nothing; what a client can rely on is everything else: shapes, counts, ids,
log-probabilities, and JSON wherever a grammar holds it.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dayzero.console import no_progress
from dayzero.rehearse.twin import TwinOptions, write_twin

CONFIG = Path(__file__).parents[1] / "paper" / "configs" / "qwen3_8b.json"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB = 448  # a few more rows than the tokenizer has ids, as published models have
TEXTS = (
    "The weather in Paris and in New York is fine today, said the assistant. What is one and two? Is seven even?",
    "Question: Answer: yes no true false city days number the of and to in that it with as for was on are by be this",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} {"answer": "yes", "score": 10}',
    "北京的天气很好。naïve café — ça va? Ελληνικά русский язык",
)
# Reasoning is off unless asked for: the prompt then ends in an empty block of it.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content is string %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking %}{{ '<think>\\n' }}{% else %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""


def write_model(folder: Path) -> None:
    """A folder as a publisher ships one, with weights. Needs ``folder`` not to exist."""
    source = folder.with_name(folder.name + "-source")
    source.mkdir(parents=True)
    tokenizer = _tokenizer()
    end = tokenizer.token_to_id("<|im_end|>")
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    ids = {"vocab_size": VOCAB, "eos_token_id": end, "bos_token_id": tokenizer.token_to_id("<|endoftext|>")}
    (source / "config.json").write_text(json.dumps(config | ids), encoding="utf-8")
    tokenizer.save(str(source / "tokenizer.json"))
    words = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **words}
    (source / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    write_twin(str(source), str(folder), TwinOptions(seed=3), no_progress)


def _tokenizer() -> Tokenizer:
    """Byte-level, with merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=430, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    assert made.get_vocab_size() <= VOCAB
    return made
