#!/bin/bash
# Four layers with the inputs of experts and of linear layers in 8 bits, which have no goals; the same phases as with bf16
# ones.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m dayzero profile "seeded:tests/paper/configs/deepseek_v32.json?layers=4&first_k_dense_replace=1" --all \
  --dtype bfloat16 --expert-inputs fp8_128 --linear-inputs fp8_128 --no-prefix-cache --pool-bytes 24GiB \
  --batch 1,16,64 --context 1024 --prefill 8192
