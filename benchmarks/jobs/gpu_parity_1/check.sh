#!/bin/bash
# Every variant against its reference, part 1 of 4.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_parity.py -k "attention.paged or attention.norm or attention.full or attention.gate or attention.merge or recurrence"
