#!/usr/bin/env bash
# Runs the suite on one interpreter and one jax: tests/matrix.sh 3.13 jax
set -eu
version=$1 requirement=$2
cd "$(dirname "$0")/.."
python=$(command -v "python$version" || true)
if [ -z "$python" ] || ! "$python" -c 'import sys' 2>/dev/null; then
  python=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python 2>/dev/null | tail -1 || true)
fi
if [ -z "$python" ]; then
  echo "no Python $version here: nothing was tested on it"
  exit 0
fi
environment=.venv-$version
[ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
"$environment/bin/pip" install --quiet --disable-pip-version-check "$requirement" "$(ls dist/*.whl)[test]"
"$environment/bin/pip" install --quiet --disable-pip-version-check --force-reinstall --no-deps dist/*.whl
"$environment/bin/python" -c 'import sys, jax; print(f"Python {sys.version.split()[0]}, jax {jax.__version__}")'
cd tests
# What a compiler builds and runs by itself is the same on every Python.
"../$environment/bin/pytest" --numprocesses auto --dist worksteal -m "not toolchain" .
