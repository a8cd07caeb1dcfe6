#!/bin/bash
# One stream against two by turns. Kimi-Linear at batch 1 is the one that counts: 2.77 ms with one, 2.38 asked for.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/streams.py --only kimi_linear_48b --batch 1,16
python3 benchmarks/streams.py --only deepseek_v32_4 --batch 1,16 --context 4000
python3 benchmarks/streams.py --only kimi_k3_8,kimi_k3_1_8 --batch 1,16
