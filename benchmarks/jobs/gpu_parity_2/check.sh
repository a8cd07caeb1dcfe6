#!/bin/bash
# Every variant against its reference, part 2 of 4.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_parity.py -k "attention.sparse or sparse_index"
