#!/bin/bash
# Tests of the delta rule over prompts and in decode, then memory and races of the convolutions.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
set -eo pipefail
python3 -m pytest -q -p no:cacheprovider -x tests/gpu/test_delta_prefill.py
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_delta_decode.py
python3 -m pytest -q -p no:cacheprovider tests/gpu/test_parity.py -k "recurrence"
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1) || true
[ -x "$tool" ] || { echo "no compute-sanitizer here"; exit 0; }
for what in memcheck racecheck; do
  code=0
  timeout 60 "$tool" --tool "$what" --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider \
    tests/gpu/test_delta_prefill.py -k "convolutions_at_true_width and 12" | tail -4 || code=$?
  [ $code != 124 ] || { echo "$what did not end in 60 s"; code=0; }
  [ $code = 0 ] || exit $code
done
