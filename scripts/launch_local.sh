#!/usr/bin/env bash
# N processes of one run on this machine: each its own GPU where there are GPUs, else CPU processes of one device each
# (XLA_FLAGS=--xla_force_host_platform_device_count=K gives each K).
# usage: scripts/launch_local.sh N CONFIG [--section.setting VALUE ...]
# Ends with the status of the first process that fails, after ending the others.
set -uo pipefail
if [ $# -lt 2 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: scripts/launch_local.sh N CONFIG [--section.setting VALUE ...]" >&2
  exit 2
fi
n=$1 config=$2
shift 2
port=${PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
export JAX_COORDINATOR_ADDRESS=localhost:$port JAX_NUM_PROCESSES=$n
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
if [ "$gpus" -gt 0 ] && [ "$gpus" -lt "$n" ]; then
  echo "launch_local.sh: $n processes, but $gpus GPUs: each process has one of its own" >&2
  exit 2
fi

pids=()
trap 'kill "${pids[@]}" 2>/dev/null' EXIT
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM INT
for ((i = 0; i < n; i++)); do
  [ "$gpus" -gt 0 ] && export CUDA_VISIBLE_DEVICES=$i
  JAX_PROCESS_ID=$i python -m jaxppo.train --config "$config" "$@" > >(sed -u "s/^/[$i] /") 2> >(sed -u "s/^/[$i] /" >&2) &
  pids+=($!)
done
for ((left = n; left > 0; left--)); do
  wait -n && continue
  status=$?
  # the others hear of it themselves and say why; they have a minute
  for ((s = 0; s < 60; s++)); do
    [ -z "$(jobs -rp)" ] && break
    sleep 1
  done
  exit $status
done
