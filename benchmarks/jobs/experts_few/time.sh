#!/bin/bash
# Triton against CUDA by turns, then the kernels' own settings: on one H200 about half a minute a shape by turns, a minute
# and a half with settings (NVRTC). Behind it: turns | sweep | both (default), then names of shapes.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
here=$(cd "$(dirname "$0")" && pwd)
python3 "$here/time_few.py" "$@"
