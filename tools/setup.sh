#!/usr/bin/env bash
# Creates the virtual environment given as first argument and installs the package with its
# development tools. Does nothing where that was already done for the same inputs.
#
# torch: 2.13.0, its CPU build where there is no NVIDIA GPU. triton: the version that the installed
# torch requires, 3.9.0 where it requires none.
#
# Reads PYTHON (interpreter of a new environment) and TORCH_INDEX_URL (an extra package index for
# torch's CPU build, as PyTorch's install page gives it).
set -euo pipefail

TORCH_VERSION=2.13.0
TRITON_VERSION=3.9.0

venv=${1:?usage: tools/setup.sh VENV}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
stamp=$venv/.tilescout-stamp

say() { echo "setup: $*" >&2; }

has_gpu() { [[ -e /dev/nvidia0 ]] || nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "no Python 3.11 or newer among: ${PYTHON:-python3.11 python3.12 python3.13 python3}." \
        "Install one (Debian 12: apt-get install python3 python3-venv) or set PYTHON."
    return 1
}

pip_install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }

install_torch() {
    local plain="torch==$TORCH_VERSION" cpu="torch==$TORCH_VERSION+cpu"
    local constraints=(-c "$root/constraints.txt")
    if has_gpu; then
        say "NVIDIA GPU found: torch $TORCH_VERSION"
        pip_install "${constraints[@]}" "$plain,!=$TORCH_VERSION+cpu"
        return
    fi
    say "no NVIDIA GPU: torch $TORCH_VERSION, CPU build"
    pip_install "${constraints[@]}" "$cpu" && return
    if [[ -n ${TORCH_INDEX_URL:-} ]]; then
        pip_install "${constraints[@]}" --extra-index-url "$TORCH_INDEX_URL" "$cpu" && return
        say "$cpu could not be installed from TORCH_INDEX_URL either"
    fi
    say "the CPU build is not in the configured package indexes; installing $plain instead, which" \
        "brings the CUDA libraries along. To avoid them set TORCH_INDEX_URL to the CPU wheel" \
        "index that PyTorch's install page names."
    pip_install "${constraints[@]}" "$plain"
}

# Prints the triton requirement to install beside the torch that is there: none where its own
# metadata names one for this platform.
triton_requirement() {
    "$venv/bin/python" - "$TRITON_VERSION" <<'PYTHON'
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

needed = [Requirement(line) for line in requires("torch") or ()]
active = [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
if not any(r.name == "triton" for r in active):
    print(f"triton=={sys.argv[1]}")
PYTHON
}

# What the environment was made from; the interpreter is not in it, as a new one needs a new folder.
fingerprint() {
    cat "$root/pyproject.toml" "$root/constraints.txt" "$root/tools/setup.sh"
    echo "$root gpu=$(has_gpu && echo yes || echo no)"
}

wanted=$(fingerprint | sha256sum | cut -d ' ' -f 1)
if [[ -f $stamp && $(<"$stamp") == "$wanted" && -x $venv/bin/tilescout ]]; then
    exit 0
fi
if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    if ! "$python" -m venv "$venv"; then
        rm -rf "$venv"
        say "$python cannot create a virtual environment: on Debian, apt-get install python3-venv"
        exit 1
    fi
fi
install_torch
say "installing tilescout and its tools"
requirement=$(triton_requirement)
# shellcheck disable=SC2086  # an empty requirement must vanish
pip_install -c "$root/constraints.txt" $requirement -e "$root[dev]"
echo "$wanted" >"$stamp"
say "ready: $venv"
