#!/bin/bash
# All shapes and ways beside cuBLAS in bf16, then settings beside the ones that are chosen.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
here=$(cd "$(dirname "$0")" && pwd)
python3 -m dayzero.ops.bench --only "linear.matmul*fp8 M=*" --out "${JOB_OUT:-.}/linear-fp8.json"
python3 -m dayzero.ops.bench --only "linear.matmul_fp8_128*" --out "${JOB_OUT:-.}/linear-rounded.json"
python3 "$here/sweep.py" few 2112,7168 24576,1536 7168,16384 36864,7168 7168,2048
python3 "$here/sweep.py" tiles 2112,7168 24576,1536 7168,16384 36864,7168
python3 "$here/sweep.py" meet 7168,16384 24576,1536
python3 "$here/sweep.py" rounded 7168,16384 24576,1536
