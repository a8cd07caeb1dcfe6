#!/bin/bash
# Recorded steps, with one stream and with two.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_graphs.py tests/gpu/test_graph_forks.py
