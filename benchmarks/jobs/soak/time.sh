#!/bin/bash
# Eight minutes of 256 clients of one server, half a minute of warm-up included: does memory grow, is a token lost?
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/soak.py seeded:tests/paper/configs/qwen3_8b.json --seconds 450 --warm-seconds 30 --clients 256 \
  --loose -- --device cuda --dtype bfloat16 --max-running 256 --max-model-len 8192
