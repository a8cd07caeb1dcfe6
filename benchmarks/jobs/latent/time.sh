#!/bin/bash
# Parity, then Triton (and other tiles of it), CUDA C++ (cuda_chunks), the absorbed form and cuDNN's attention in one run:
# the shapes that matter first, then all. About 4 minutes on one H200; with "first" behind it one.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m dayzero.ops.bench --out "${JOB_OUT:-.}/latent_first.json" \
  --named "latent.attend/triton T=8192 behind 0, 32 heads of 128 + 64 / 128" \
  --named "latent.attend/cuda_chunks T=8192 behind 0, 32 heads of 128 + 64 / 128" \
  --named "latent.attend/triton T=16384 behind 16384, 32 heads of 128 + 64 / 128" \
  --named "latent.attend/cuda_chunks T=16384 behind 16384, 32 heads of 128 + 64 / 128"
[ "$1" = first ] || python3 -m dayzero.ops.bench --only "latent.attend" --limit 240 --out "${JOB_OUT:-.}/latent_all.json"
