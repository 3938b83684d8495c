#!/usr/bin/env bash
# Makes the peers' own virtual environments beside this script; a second call does nothing.
# TensorFlow's peer uses the project's .venv. What cannot be installed is logged, and the others go
# on; the exit code is then 1.
#
#   peer      packages                            Python            set it by
#   torch     torch 2.13, numpy 2.4               3.11 or later     TORCH_PYTHON
#   mxnet     mxnet 1.9.1, numpy 1.23.5           3.10 or 3.11      MXNET_PYTHON
#   flower    flwr 1.20, torch 2.13, numpy 2.4    3.11 or later     FLOWER_PYTHON
#
# MXNet 1.9.1 uses np.bool, which numpy dropped in 1.24; numpy 1.23.5 has no wheels for Python 3.12.
# Its library needs the system's libquadmath (Debian: libquadmath0) and libgomp (libgomp1). Flower
# 1.20 is of the line that has start_server and start_client: one process a client for the whole
# run, where later ones start a process for each round.
set -uo pipefail
cd "$(dirname "$0")"
failed=0

log() { echo "peers/setup: $*" >&2; }

# The first interpreter that exists and is of a version from MINOR_FIRST to MINOR_LAST.
interpreter() { # PREFERRED MINOR_FIRST MINOR_LAST
  local candidate test="import sys; sys.exit(not (3, $2) <= sys.version_info[:2] <= (3, $3))"
  for candidate in $1 python3 python3.11 python3.12 python3.13 python3.10; do
    if "$candidate" -c "$test" 2>/dev/null; then echo "$candidate"; return 0; fi
  done
  return 1
}

# uv, where the project's environment has it, is faster than pip and shares torch between two
# environments.
install() { # ENVIRONMENT PACKAGE...
  local python=$1/bin/python
  shift
  if ../../.venv/bin/python -m uv --version >/dev/null 2>&1; then
    ../../.venv/bin/python -m uv pip install --quiet --python "$python" "$@"
  else
    "$python" -m pip install --quiet "$@"
  fi
}

environment() { # NAME PREFERRED_PYTHON MINOR_FIRST MINOR_LAST CHECK PACKAGE...
  local name=$1 preferred=$2 first=$3 last=$4 check=$5 python
  shift 5
  local folder=.venv-$name
  if [ "$(cat "$folder/.complete" 2>/dev/null)" = "$*" ]; then return; fi
  if ! python=$(interpreter "$preferred" "$first" "$last"); then
    log "$name is left out: no Python of 3.$first to 3.$last; set ${name^^}_PYTHON"
    failed=1
  elif ! { rm -rf "$folder" && "$python" -m venv "$folder" && install "$folder" "$@"; }; then
    log "$name is left out: cannot install $* with $("$python" --version)"
    failed=1
  elif ! "$folder/bin/python" -c "$check"; then
    log "$name is left out: installed, but '$check' fails; see the notes in this script"
    failed=1
  else
    echo "$*" >"$folder/.complete"
  fi
}

environment torch "${TORCH_PYTHON:-}" 11 13 "import torch.distributed" torch==2.13.0 numpy==2.4.6
environment mxnet "${MXNET_PYTHON:-}" 10 11 "import mxnet" mxnet==1.9.1 numpy==1.23.5
environment flower "${FLOWER_PYTHON:-}" 11 13 "import flwr, torch" \
  flwr==1.20.0 torch==2.13.0 numpy==2.4.6
exit $failed
