#!/usr/bin/env bash
# Builds the program that needs no Python. Usage: docker/build.sh FOLDER
#
#   FOLDER/aserve/            the program, which the image holds, and of which docker/pack.sh makes one file
#   FOLDER/aserve.cdx.json    its software bill of materials (CycloneDX)
#
# DEVICE=cuda keeps Triton, and needs a CUDA build of torch; PYTHON and TORCH_INDEX are those of the Makefile.
set -euo pipefail

source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
work=$(mktemp -d "$out/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

install_program() {
    "${PYTHON:-python3}" -m venv "$work/venv"
    local install=("$work/venv/bin/pip" install --quiet --constraint "$source/constraints.txt")
    "${install[@]}" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
    if [ "${DEVICE:-cpu}" = cpu ] && compgen -G "$work/venv/lib/python3*/site-packages/nvidia*" > /dev/null; then
        echo "pip found a CUDA build of torch: give TORCH_INDEX, or DEVICE=cuda" >&2
        exit 1
    fi
    "${install[@]}" "$source"
    if [ "${DEVICE:-cpu}" = cpu ]; then "$work/venv/bin/pip" uninstall --quiet --yes triton; fi
}

list_packages() {
    "${PYTHON:-python3}" -m venv "$work/sbom"
    "$work/sbom/bin/pip" install --quiet --constraint "$source/docker/constraints.txt" cyclonedx-bom
    "$work/sbom/bin/cyclonedx-py" environment --output-file "$out/aserve.cdx.json" "$work/venv"
}

freeze() {
    "$work/venv/bin/pip" install --quiet --constraint "$source/docker/constraints.txt" pyinstaller
    rm -rf "$out/aserve"
    "$work/venv/bin/pyinstaller" --noconfirm --log-level WARN --distpath "$out" --workpath "$work/freeze" \
        "$source/docker/aserve.spec"
    # The kernels' sources are files, and their bytecode has to be there already: the image is read-only.
    "$work/venv/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$out/aserve/_internal/aserve_kernels"
}

compile_kernels() {
    XDG_CACHE_HOME=$work/cache "$out/aserve/aserve" kernels build
    local kernels=$out/aserve/_internal/aserve_kernels/compiled
    mv "$work"/cache/aserve/kernels-* "$kernels"
    rm -f "$kernels"/*.lock
    chmod -R u=rwX,go=rX "$out/aserve"
}

install_program
list_packages
freeze
compile_kernels
du -sh "$out"/aserve
