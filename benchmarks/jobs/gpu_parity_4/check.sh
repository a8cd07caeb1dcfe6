#!/bin/bash
# Every variant against its reference, part 4 of 4; part 4 is what the others leave.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_parity.py -k "not (attention.paged or attention.norm or attention.full or attention.gate or attention.merge or recurrence or attention.sparse or sparse_index or linear or moe or cache)"
