#!/bin/bash
# memcheck and racecheck over small launches of each kernel: a table on stdout, whole logs in $JOB_OUT/sanitize.tgz. About
# 3 minutes with 6 at a time on one H200. LIMIT: seconds for each run; AT_ONCE: runs; FULL=1: stricter builds too.
here=$(cd "$(dirname "$0")" && pwd); out=${JOB_OUT:-.}/sanitize-logs; mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
limit=${LIMIT:-90}; at_once=${AT_ONCE:-6}
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer 2>/dev/null | head -1)
[ -x "$tool" ] || { echo "no compute-sanitizer here"; exit 3; }
"$tool" --version | tail -1
if "$tool" --help | grep -q -- '--kernel-name '; then flag="--kernel-name" part="kernel_substring=" whole="kernel_name="
else flag="--kernel-regex" part="kns=" whole="kne="; fi
export here out tool flag part whole limit
python3 "$here/case.py" all --kernels >"$out/kernels.txt" || exit 4
# First without a tool: they run, end, and the builds under SYNC_BOTH have the same bits. It also compiles them.
plain() { # GROUP ARGUMENTS
  local name="plain $*"; local log="$out/${name// /_}.log"
  timeout "$limit" python3 "$here/case.py" "$@" >"$log" 2>&1 && echo "runs    $*" || { echo "FAILS ($?)  $*"; tail -3 "$log"; }
}
one() { # TOOL GROUP ARGUMENTS
  local what=$1 name="$*"; local log="$out/${name// /_}.log"; shift
  local kernels; kernels=$(grep "^$1 " "$out/kernels.txt" | cut -d' ' -f2)
  case $kernels in _*) kernels=$whole$kernels ;; *) kernels=$part$kernels ;; esac  # a Triton kernel's whole name
  local options="--report-api-errors no --print-limit 40"; [ "$what" = racecheck ] && options+=" --racecheck-report analysis"
  local began=$SECONDS
  timeout "$limit" "$tool" --tool "$what" $options "$flag" "$kernels" python3 "$here/case.py" "$@" >"$log" 2>&1
  local code=$? said; said=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|Device not supported' "$log" | tail -1 | sed 's/=* *//')
  [ $code = 124 ] && said="did not end in $limit s; $said"
  local line="| $what | $* | ${said:-no summary (exit $code)} | $((SECONDS - began)) s |" where
  # Where: each pair of places once, by how often it stands there.
  where=$(grep -hE 'Race reported|hazard at|and (Read|Write) access|in block' "$log" | sed 's/=* *//; s/block ([0-9,]*)//; s/thread ([0-9,]*)//' | sort | uniq -c | sort -rn | head -8 | sed 's/^/    /')
  printf '%s\n' "$line" ${where:+"$where"}
}
export -f plain one
groups="sparse_bf16 sparse_fp8 latent_bf16 latent_fp8"
for g in $groups; do for s in 1 ${FULL:+2}; do echo "$g --compare --sync $s"; done; done >"$out/plain.txt"
for g in paged_prefill paged_decode paged_decode_tried linear latent_attend heads_write router delta_decode index_score top_k_tried; do echo "$g"; done >>"$out/plain.txt"
xargs -P "$at_once" -I{} bash -c 'plain {}' <"$out/plain.txt" | tee "${JOB_OUT:-.}/plain.txt"
{ for g in $groups; do echo "racecheck $g --sync 1"; done
  for g in paged_decode paged_decode_tried paged_prefill linear latent_attend heads_write router route index_score_tried top_k_tried; do echo "racecheck $g"; done
  for g in $groups paged_decode paged_decode_tried paged_prefill linear latent_attend heads_write router route index_score_tried top_k_tried delta_decode; do echo "memcheck $g"; done
  [ -n "$FULL" ] && for g in $groups; do echo "racecheck $g --sync 2"; echo "racecheck $g"; done
  [ -n "$FULL" ] && echo "memcheck sparse_fp8 --widen-once"
} >"$out/jobs.txt"
echo "| tool | kernels | found | |"; echo "| --- | --- | --- | --- |"
xargs -P "$at_once" -I{} bash -c 'one {}' <"$out/jobs.txt" | tee "${JOB_OUT:-.}/table.md"
tar czf "${JOB_OUT:-.}/sanitize.tgz" -C "$out" . && rm -r "$out"
! grep -q "^FAILS" "${JOB_OUT:-.}/plain.txt" && ! grep -qE "\| [A-Z ]*SUMMARY: [1-9]" "${JOB_OUT:-.}/table.md"
