#!/usr/bin/env bash
# Packs a program's folder into one executable file. Usage: docker/pack.sh FOLDER FILE
#
# FOLDER holds the program `aserve`. FILE is the shell script unpack.sh with the folder, as an archive, behind its last line.
set -euo pipefail

source=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
archive=$(mktemp "$2.XXXXXX")
trap 'rm -f "$archive"' EXIT
tar --create --gzip --sort=name --owner=0 --group=0 --mode=u=rwX,go=rX --directory "$1" --file "$archive" .
digest=$(sha256sum "$archive" | cut -c 1-16)
sed "s/@DIGEST@/$digest/; s/@SIZE@/$(stat -c %s "$archive")/" "$source/unpack.sh" > "$2"
cat "$archive" >> "$2"
chmod 755 "$2"
