#!/bin/bash
# The operators' whole table, no entry begun after 150 s; flash-linear-attention beside it where PYTHONPATH has it.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python3 -m dayzero.ops.bench --table --limit 150 --out "${JOB_OUT:-.}/table.json"
