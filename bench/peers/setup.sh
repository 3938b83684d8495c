#!/usr/bin/env bash
# Makes the peers' own virtual environments, outside the repository: in $THINWIRE_PEERS, or
# ~/.cache/thinwire/peers. A second call does nothing. TensorFlow's peer uses the project's .venv.
# What cannot be installed is logged, and the others go on; the exit code is then 1.
#
#   environment  packages                                    Python         set it by
#   torch        torch 2.13, torchft 0.2, numpy 2.4, grpcio  3.11 to 3.13   TORCH_PYTHON
#   hivemind     hivemind 1.1.12, torch 2.13, numpy 2.4      3.11 to 3.13   HIVEMIND_PYTHON
#   flower       flwr 1.41, torch 2.13, numpy 2.4            3.11 to 3.13   FLOWER_PYTHON
#   mxnet        mxnet 1.9.1, numpy 1.23.5                   3.10 or 3.11   MXNET_PYTHON
#
# torch is its CPU build where pip finds one (its wheel in a folder that PIP_FIND_LINKS names, or
# torch's own index by PIP_EXTRA_INDEX_URL); else pip takes the one with CUDA, 5 GB for each
# environment. Each has one of its own: flwr needs a protobuf below 7, which the others do not
# get, and what cannot be installed takes no other with it. torchft's lighthouse and hivemind's p2pd are binaries in their wheels. Flower
# still has start_server and start_client, which it calls deprecated: one process a client for the
# whole run, where its newer ways start a process for each round.
#
# MXNet 1.9.1 uses np.bool, which numpy dropped in 1.24; numpy 1.23.5 has no wheels for Python 3.12.
# Its library needs the system's libquadmath (Debian: libquadmath0) and libgomp (libgomp1).
set -uo pipefail
home=${THINWIRE_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/thinwire/peers}
mkdir -p "$home" && cd "$home" || exit 1
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

environment() { # NAME PREFERRED_PYTHON MINOR_FIRST MINOR_LAST CHECK PACKAGE...
  local name=$1 preferred=$2 first=$3 last=$4 check=$5 python
  shift 5
  if [ "$(cat "$name/.complete" 2>/dev/null)" = "$*" ]; then return; fi
  if ! python=$(interpreter "$preferred" "$first" "$last"); then
    log "$name is left out: no Python of 3.$first to 3.$last; set ${name^^}_PYTHON"
    failed=1
  elif ! { rm -rf "$name" && "$python" -m venv "$name" &&
      "$name/bin/python" -m pip install -qq "$@"; }; then
    log "$name is left out: cannot install $* with $("$python" --version)"
    failed=1
  elif ! "$name/bin/python" -c "$check"; then
    log "$name is left out: installed, but '$check' fails; see the notes in this script"
    failed=1
  else
    echo "$*" >"$name/.complete"
  fi
}

# absl-py is for the reader of the decoder's text. "thinwire torch" runs in the environment torch,
# from this checkout: what it needs without Keras is grpcio to tensorboard.
common=(torch==2.13.0 numpy==2.4.6 absl-py==2.5.0)
thinwire=(grpcio==1.80.0 grpcio-health-checking==1.80.0 protobuf==6.33.6)
thinwire+=(prometheus-client==0.26.0 ml-dtypes==0.6.0 cloudpickle==3.1.2 tensorboard==2.21.0)
environment torch "${TORCH_PYTHON:-}" 11 13 "import grpc, torchft.local_sgd" torchft==0.2.0 \
  "${common[@]}" "${thinwire[@]}"
environment hivemind "${HIVEMIND_PYTHON:-}" 11 13 "import hivemind" hivemind==1.1.12 "${common[@]}"
environment flower "${FLOWER_PYTHON:-}" 11 13 "import flwr.server.strategy, torch" \
  flwr==1.41.0 "${common[@]}"
environment mxnet "${MXNET_PYTHON:-}" 10 11 "import mxnet" mxnet==1.9.1 numpy==1.23.5
exit $failed
