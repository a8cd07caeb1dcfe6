#!/bin/bash
# Loading 3.8 GiB against reading them, from disk and from the page cache, with no other work on the machine. Free space
# is needed in the repository's folder.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
folder=$(mktemp -d load.XXXXXX)
trap 'rm -rf "$folder"' EXIT
python3 benchmarks/load.py tests/paper/configs/qwen3_8b.json "$folder/checkpoint" --device cuda \
  --set num_hidden_layers=4 --rounds 3
