#!/bin/bash
# Stages of an acceptance that only a GPU can judge, over a whole model with made weights.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m dayzero accept seeded:tests/paper/configs/kimi_linear_48b_a3b.json \
  --stages performance,robustness,contract --out "${JOB_OUT:-.}/record" \
  -- --dtype bfloat16 --max-model-len 8192 --max-running 256
