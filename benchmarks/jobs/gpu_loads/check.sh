#!/bin/bash
# Loading, seeded weights, experts that are fetched, and a model of full width.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_load.py tests/gpu/test_experts_fetched.py tests/gpu/test_full_width.py \
  tests/gpu/test_seeded_device.py
