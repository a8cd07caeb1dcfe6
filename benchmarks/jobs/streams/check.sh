#!/bin/bash
# Two streams inside recorded steps: to the bit one stream, in pieces too, early launches across forks and joins.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
set -e
python3 -m pytest -q -p no:cacheprovider -x tests/gpu/test_graph_forks.py
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_graphs.py -k "graphs_give or pieces or waits_for_nothing"
