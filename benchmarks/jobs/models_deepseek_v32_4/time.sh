#!/bin/bash
# A whole model against its goals: decode by batch size, and prefill.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/models.py --only deepseek_v32_4 --out "${JOB_OUT:-.}"
