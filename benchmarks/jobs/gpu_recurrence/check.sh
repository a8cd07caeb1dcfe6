#!/bin/bash
# The delta rule, beyond the cases.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_delta_decode.py tests/gpu/test_delta_prefill.py
