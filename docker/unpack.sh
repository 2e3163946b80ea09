#!/bin/sh
# aserve as one file. Its first start unpacks the program to the user's cache; later ones find it there.
set -eu
cache="${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/aserve"
program="$cache/program-@DIGEST@"
if [ ! -x "$program/aserve" ]; then
    (umask 077 && mkdir -p "$cache")
    new=$(mktemp -d "$cache/unpacking.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    trap 'exit 1' HUP INT TERM
    echo "aserve: unpacking the program to $program" >&2
    tail -c @SIZE@ "$0" | tar -xz -C "$new"
    # Another start may have been first.
    mv -T "$new" "$program" 2> /dev/null || [ -x "$program/aserve" ]
    trap - EXIT HUP INT TERM
    rm -rf "$new"
fi
exec "$program/aserve" "$@"
