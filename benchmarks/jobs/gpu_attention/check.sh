#!/bin/bash
# Operators over caches, beyond the cases.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_attention.py tests/gpu/test_latent_chunks.py tests/gpu/test_sparse_attention.py \
  tests/gpu/test_sync_both.py tests/gpu/test_index_chain.py tests/gpu/test_cache.py tests/gpu/test_heads_write.py
