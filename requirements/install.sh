#!/bin/bash
# Brings .venv up to the locks: requirements/install.sh SET..., with SET analysis, measure or dev, in this order, or
# quant or interpreter, which are optional and bring no dependencies.
# A set's stamp is a copy of the lock that pip has finished installing, so an interrupted install is finished by the
# next call, an unchanged lock costs nothing, and the file times that git scrambles decide nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python

say() { echo "decode-gap: $*" >&2; }

make_venv() {
    [ -e .venv/created.stamp ] && [ -x "$python" ] && return
    local candidate reason found=()
    for candidate in python3 python3.13 python3.12 python3.11; do
        if ! command -v "$candidate" >/dev/null; then
            found+=("no $candidate")
        elif reason=$("$candidate" requirements/interpreter.py --venv 2>&1); then
            say "making .venv with $("$candidate" --version)"
            "$candidate" -m venv .venv
            touch .venv/created.stamp
            return
        else
            reason=${reason##*$'\n'}
            found+=("${reason#decode-gap: }")
        fi
    done
    say "no usable Python: $(printf '%s; ' "${found[@]}")needed is 3.11, 3.12 or 3.13 with venv" \
        "(Debian, Ubuntu: apt install python3 python3-venv), or PYTHON=/path/to/one that has the packages"
    exit 2
}

# What `make sizes` measured of a set.
measured() { sed -n "/^\[$1\]/,/^\[/s/^$2 = //p" requirements/sizes.toml; }

size_of() {
    case $1 in
        analysis) echo "$(measured analysis packages) packages, $(measured analysis mb) MB in .venv, a minute or two" ;;
        measure) echo "torch and transformers; on Linux the registry's torch is a CUDA build of several GB, and" \
            "PIP_ARGS= can point pip at another; a CPU build: $(measured measure mb) MB in .venv, a minute" ;;
        interpreter) echo "Triton, for tests of kernels without a GPU, $(measured interpreter mb) MB in .venv, half a minute" ;;
        quant) echo "sources of kernels and a build tool, about 10 MB in .venv, some seconds" ;;
        dev) echo "tests and linters, $(measured dev mb) MB in .venv, half a minute" ;;
    esac
}

install_set() {
    local name=$1 lock=requirements/$1.lock stamp=.venv/$1.stamp started=$SECONDS options=()
    cmp --silent "$lock" "$stamp" && return
    say "installing $name: $(size_of "$name")"
    rm -f "$stamp"
    # Split into words and nothing more: a ; or a $( in PIP_ARGS is text.
    read -ra options <<<"${PIP_ARGS:-}"
    local pip=("$python" -m pip --require-virtualenv --disable-pip-version-check --no-input install -qq)
    # The sets below stay in force, so that pip cannot move what they pinned.
    local requirements=() below
    if [ "$name" = quant ] || [ "$name" = interpreter ]; then
        requirements+=(--no-deps --no-build-isolation --requirement "$lock")
    else
        for below in analysis measure dev; do
            requirements+=(--requirement "requirements/$below.lock")
            [ "$below" = "$name" ] && break
        done
    fi
    "${pip[@]}" "${options[@]}" "${requirements[@]}"
    if [ "$name" = analysis ]; then # setuptools is there now: nothing has to be fetched to build the project itself
        "${pip[@]}" --no-deps --no-build-isolation --editable .
    fi
    cp "$lock" "$stamp.new" && mv "$stamp.new" "$stamp"
    say "installed $name in $((SECONDS - started)) s"
}

make_venv
for name; do install_set "$name"; done
