#!/bin/bash
# A whole model against its goals: decode by batch size, and prefill.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/models.py --only gpt_oss_20b --out "${JOB_OUT:-.}"
