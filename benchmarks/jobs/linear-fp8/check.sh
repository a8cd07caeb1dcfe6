#!/bin/bash
# Products with weights in 8 bits: about 3 minutes, most of it float64 references.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
set -e
python3 -m pytest -q -p no:cacheprovider -x tests/gpu/test_linear_fp8.py
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_parity.py -k linear
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_plain.py -k "rows or true_widths or replay"
