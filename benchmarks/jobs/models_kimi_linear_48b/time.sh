#!/bin/bash
# A whole model against its goals: decode by batch size, and prefill.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/models.py --only kimi_linear_48b --out "${JOB_OUT:-.}"
