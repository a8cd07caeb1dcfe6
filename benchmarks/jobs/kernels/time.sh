#!/bin/bash
# Default against candidate by turns, each checked first: about 2 minutes on one H200. Behind it: names of groups, such as
# index decode.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
here=$(cd "$(dirname "$0")" && pwd)
python3 "$here/compare.py" "$@"
