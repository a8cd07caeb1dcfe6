#!/bin/bash
# Products, routed experts and the router, beyond the cases.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_plain.py tests/gpu/test_linear_fp8.py tests/gpu/test_experts.py \
  tests/gpu/test_experts_few.py tests/gpu/test_experts_few_tiles.py tests/gpu/test_router.py
