#!/usr/bin/env bash
# Builds the image without a Docker daemon and tries it: `make image-check`. It needs root, buildah and debootstrap.
#
# The image's program runs as the image's user and as process 1, on the image's files, which are read-only. OpenAI's client asks it.
#
#   WORK=FOLDER      where to build, which takes 20 GB; default: a new folder, which is removed
#   MIRROR=URL       Debian's mirror; default: that of this machine's apt
#   MOUNTS=A:B       folders that the build sees, too, such as those with packages for pip
#   PIP_CONFIG_FILE  pip's settings in the build
#   TRY_ONLY=1       tries the image that an earlier run left in WORK
#   MAX_START_S      seconds from the start to the first answer; default: 5, for a machine that does nothing else
#   PORT, PYTHON     the port of the server, and a Python with OpenAI's client
set -euo pipefail

MAX_BYTES=1300000000
MAX_START_S=${MAX_START_S:-5}

source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$source/.venv/bin/python}
port=${PORT:-18000}
work=${WORK:-$(mktemp -d)}
root=
unshared=

main() {
    mkdir -p "$work"
    if [ -z "${TRY_ONLY:-}" ]; then
        make_base
        build_image
    fi
    find_root
    check_files
    check_server
    check_server --processes 2
    check_other_commands
    check_single_file
    say "all is well"
}

say() { printf '%s  %s\n' "$(date +%T)" "$*"; }
fail() { say "FAILED: $*"; exit 1; }
build() { buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"; }

clean_up() {
    # The server changes its user, which clears the signal that --kill-child asked for.
    [ -z "$unshared" ] || pkill -KILL --parent "$unshared" || true
    [ -n "${WORK:-}" ] || rm -rf "$work"
}
trap clean_up EXIT

# Like the official slim image: without documentation and downloaded packages.
make_base() {
    say "base image, by debootstrap"
    local mirror container
    mirror=${MIRROR:-$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources | head -1)}
    [ -d "$work/base" ] || debootstrap --variant=minbase bookworm "$work/base" "$mirror" > "$work/debootstrap.log"
    rm -rf "$work"/base/usr/share/{doc,info,locale,man}/* "$work"/base/var/cache/apt/* "$work"/base/var/lib/apt/lists/*
    container=$(build from scratch)
    build copy --quiet "$container" "$work/base" / > /dev/null
    build commit --quiet --rm "$container" localhost/base > /dev/null
}

build_image() {
    say "image, by buildah"
    local mount mounts options
    options=(--isolation chroot --format docker --target cpu --tag localhost/aserve --pull-never
        --build-arg BASE=localhost/base --build-arg TORCH_INDEX="${TORCH_INDEX:-}")
    IFS=: read -ra mounts <<< "${MOUNTS:-}"
    for mount in "${mounts[@]}"; do options+=(--volume "$mount:$mount:ro"); done
    [ -z "${PIP_CONFIG_FILE:-}" ] || options+=(--secret id=pip,src="$PIP_CONFIG_FILE")
    build build "${options[@]}" --file "$source/docker/Dockerfile" "$source" > "$work/build.log" 2>&1 \
        || { tail -30 "$work/build.log"; fail "the build"; }
}

# A container's file tree is in `root`, and its command, variables, user and health check in variables of their own.
find_root() {
    root=$(build mount "$(build from --pull-never localhost/aserve)")
    build inspect --type image localhost/aserve > "$work/image.json"
    eval "$("$python" - "$work/image.json" <<'PYTHON'
import json, shlex, sys
config = json.load(open(sys.argv[1]))["Docker"]["config"]
for name, words in {
    "command": config["Entrypoint"],
    "arguments": config["Cmd"],
    "variables": config["Env"],
    "health": config["Healthcheck"]["Test"][1:],
}.items():
    print(f"{name}=({shlex.join(words)})")
print("user=" + shlex.quote(config["User"]))
PYTHON
)"
}

check_files() {
    local size
    size=$(du --summarize --block-size=1 "$root" | cut -f 1)
    say "unpacked: $((size / 1000000)) MB, of which the base has $(du --summarize --block-size=1000000 "$work/base" | cut -f 1)"
    [ "$size" -lt "$MAX_BYTES" ] || fail "the image is larger than $((MAX_BYTES / 1000000)) MB"
    [ "${user%%:*}" -gt 0 ] || fail "the image's user is root"
    [ ! -e "$root/usr/bin/python3" ] || fail "the image has a Python"
    grep -q '"CycloneDX"' "$root/usr/share/doc/aserve/aserve.cdx.json" || fail "the image has no list of its packages"
}

# Runs a command as a container does: as the image's user and process 1, with a read-only root and 64 MB of /dev/shm.
# shellcheck disable=SC2016 # the inner shell expands it
contained() {
    exec unshare --mount --pid --fork --kill-child --ipc --uts sh -euc '
        root=$1 user=$2; shift 2
        mount --make-rprivate /
        mount --bind "$root" "$root"
        mount -t tmpfs -o mode=755 tmpfs "$root/dev"
        for device in null zero full random urandom; do
            touch "$root/dev/$device"
            mount --bind "/dev/$device" "$root/dev/$device"
        done
        mkdir "$root/dev/shm"
        mount -t tmpfs -o mode=1777,size=64m,nosuid,nodev,noexec tmpfs "$root/dev/shm"
        mount -t proc proc "$root/proc"
        mount -o remount,bind,ro "$root"
        exec chroot --userspec="$user" "$root" env --ignore-environment --chdir=/models "$@"
    ' sh "$root" "$user" "${variables[@]}" ASERVE_PORT="$port" "$@"
}

check_server() {
    local started process code
    say "server: ${command[*]} ${arguments[*]} $*"
    started=$(date +%s.%N)
    contained "${command[@]}" "${arguments[@]}" "$@" > "$work/server.log" 2>&1 &
    unshared=$!
    "$python" "$source/docker/ask.py" "http://127.0.0.1:$port" "$started" "$MAX_START_S" || { cat "$work/server.log"; fail "the answers"; }
    process=$(pgrep --parent "$unshared")
    [ "$(awk '/^NSpid/ {print $NF}' "/proc/$process/status")" = 1 ] || fail "the server is not process 1"
    [ "$(stat -c %u "/proc/$process")" = "${user%%:*}" ] || fail "the server runs as another user"
    ! touch "/proc/$process/root/file" 2> /dev/null || fail "the root can be written"
    nsenter --target "$process" --mount --pid --root --setgid "${user#*:}" --setuid "${user%%:*}" \
        env --ignore-environment "${variables[@]}" ASERVE_PORT="$port" "${health[@]}" || fail "the health check"
    kill -TERM "$process"
    code=0; wait "$unshared" || code=$?
    unshared=
    [ "$code" = 0 ] || { cat "$work/server.log"; fail "the exit code after SIGTERM is $code"; }
    ! grep -E 'WARNING|ERROR|Traceback|compiling' "$work/server.log" || fail "the server's log"
    say "SIGTERM: exit code 0"
}

check_other_commands() {
    say "other commands"
    (contained "${command[@]}" version)
    [ "$( (contained "${command[@]}" generate "27+15=" --max-tokens 2 --model-impl transformers --log-level error) )" = 42 ] \
        || fail "a model in the code of transformers"
}

# A file tree without Python stands for another machine.
check_single_file() {
    local file=$work/base/run/aserve start started
    "$source/docker/pack.sh" "$root/opt/aserve" "$file"
    say "single file: $(($(stat -c %s "$file") / 1000000)) MB"
    [ ! -e "$work/base/usr/bin/python3" ] || fail "the base has a Python"
    mkdir "$work/base/run/home"
    for start in first second; do
        started=$(date +%s)
        [ "$(alone /run/aserve generate "27+15=" --max-tokens 2)" = 42 ] || fail "the single file"
        say "$start start and answer: $(($(date +%s) - started)) s"
    done
    rm -r "$work/base/run/home" "$file"
}

# Runs a command on the base's file tree.
# shellcheck disable=SC2016 # the inner shell expands it
alone() {
    unshare --mount --pid --fork sh -euc '
        mount -t proc proc "$0/proc"
        exec chroot "$0" env --ignore-environment HOME=/run/home PATH=/usr/bin:/bin "$@"
    ' "$work/base" "$@"
}

main
