#!/bin/bash
# Long prompts: the default, the norm inside the scan, and the scan's loads apart, by turns; each launch by itself.
# --try behind it: other tile sizes too.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
here=$(cd "$(dirname "$0")" && pwd)
python3 "$here/time_delta.py" "$@"
