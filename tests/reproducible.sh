#!/usr/bin/env bash
# Builds the wheel of HEAD twice, in two places and from a source archive once more, and compares the bytes.
# The archive is built with pip's index turned off: what it needs must be installed already.
set -eu
python=$1
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
commit=$(git -C "$root" rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct "$commit")
export SOURCE_DATE_EPOCH
requires=$("$python" -c 'import sys, tomllib; print(*tomllib.load(open(sys.argv[1], "rb"))["build-system"]["requires"], sep="\n")' "$root/pyproject.toml")
"$python" -m venv "$work/venv"
echo "$requires" > "$work/requires.txt"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check -r "$work/requires.txt" cmake ninja
build() { "$work/venv/bin/pip" wheel --quiet --disable-pip-version-check --no-index --no-build-isolation --no-deps --wheel-dir "$2" "$1"; }
for place in one another/place; do
  git clone --quiet "$root" "$work/$place"
  git -C "$work/$place" checkout --quiet --detach "$commit"
  build "$work/$place" "$work/$place/dist"
done
mkdir "$work/unpacked"
(cd "$work/one" && "$work/venv/bin/python" -c 'import scikit_build_core.build as b; b.build_sdist("'"$work"'")')
tar -xzf "$work"/jaxquant-*.tar.gz -C "$work/unpacked" --strip-components 1
build "$work/unpacked" "$work/unpacked/dist"
sha256sum "$work"/*/dist/*.whl "$work"/*/*/dist/*.whl | sed "s| $work/| |"
test "$(sha256sum "$work"/*/dist/*.whl "$work"/*/*/dist/*.whl | cut -d' ' -f1 | sort -u | wc -l)" = 1
