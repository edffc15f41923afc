#!/bin/sh
# Back up the plants of PLANTS_STORE, a file or a database, while servers use it:
#
#   PLANTS_STORE=jsonl:plants.jsonl deploy/backup.sh DIRECTORY [KEEP]
#
# Write DIRECTORY/plants-TIME.jsonl, verify it, and keep the newest KEEP backups (14).
# If anything fails, the exit code is not 0 and all older backups stay. Fewer plants than
# in the backup before are a failure too, because no request deletes a plant.
set -eu
umask 077

directory=${1:?usage: backup.sh DIRECTORY [KEEP]}
keep=${2:-14}
[ "$keep" -ge 1 ] || { echo 'KEEP is a number from 1 on' >&2; exit 2; }
checkout=$(cd "$(dirname "$0")/.." && pwd)

store() {
    PYTHONPATH=$checkout "$checkout/.venv/bin/python" -P -m store "$@"
}

mkdir -p "$directory"
for newest in "$directory"/plants-*.jsonl; do :; done # sorted by time
[ -e "$newest" ] || newest=/dev/null

copy=$(mktemp "$directory/unfinished.XXXXXX")
trap 'rm -f "$copy"' EXIT
trap 'exit 1' HUP INT TERM
store list "${PLANTS_STORE:?names the store}" > "$copy" # a pipe would hide a failure
verified=$(store check "$copy")
before=$(wc -l < "$newest")
if [ "${verified%% *}" -lt "$before" ]; then
    echo "$verified, but $newest has $before: find out why, or move it away" >&2
    exit 1
fi
sync "$copy"
finished=$directory/plants-$(date -u +%Y%m%dT%H%M%SZ).jsonl
mv "$copy" "$finished"
sync "$directory"
echo "$finished: $verified"

set -- "$directory"/plants-*.jsonl
while [ $# -gt "$keep" ]; do
    rm "$1"
    shift
done
