#!/bin/bash
# The kernels for very few tokens beyond the cases and on them, and the products whose header they share.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
set -e
python3 -m pytest -q -p no:cacheprovider -x tests/gpu/test_experts_few.py tests/gpu/test_experts_few_tiles.py
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_parity.py -k "moe.experts-cuda"
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_plain.py -k "few_rows or true_widths or graphs"
