#!/bin/bash
# Dense latent attention in both forms, and what shares its kernels: 3 to 4 minutes.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
set -e
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_latent_chunks.py tests/gpu/test_attention.py
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_parity.py -k "latent.attend or attention.paged"
