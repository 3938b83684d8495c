#!/usr/bin/env bash
# Makes the peers' own virtual environments beside this script; a second call does nothing.
# TensorFlow's peer uses the project's .venv.
set -euo pipefail
cd "$(dirname "$0")"
environment=.venv-torch
if [ -e "$environment/.complete" ]; then exit 0; fi
test -x "$environment/bin/python" || "${PYTHON:-python3}" -m venv "$environment"
install=("$environment/bin/python" -m pip install --quiet)
"${install[@]}" torch==2.13.0 numpy==2.4.6
touch "$environment/.complete"
