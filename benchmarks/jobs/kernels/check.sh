#!/bin/bash
# Tests of the kernels that have candidates, as they are by default: about a minute.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m pytest -q -p no:cacheprovider -x tests/gpu/test_index_chain.py tests/gpu/test_sparse_attention.py \
  tests/gpu/test_delta_decode.py tests/gpu/test_attention.py -k "not two_billion"
