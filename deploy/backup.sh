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
[ $# -le 2 ] && expr "x$keep" : 'x[1-9][0-9]*$' > /dev/null || {
    echo 'give DIRECTORY, and perhaps KEEP, which is a number from 1 on' >&2
    exit 2
}
program=$0
[ ! -L "$program" ] || program=$(readlink -f "$program")
checkout=$(CDPATH='' cd "$(dirname "$program")/.." && pwd)

store() {
    PYTHONPATH=$checkout "$checkout/.venv/bin/python" -P -m store "$@"
}

# Only what this script has made: other files in the directory stay.
digits='[0-9][0-9][0-9][0-9]'
list() {
    find "$directory" -maxdepth 1 -type f \
        -name "plants-$digits${digits}T$digits[0-9][0-9]Z.jsonl" | LC_ALL=C sort
}

mkdir -p "$directory"
directory=$(CDPATH='' cd "$directory" && pwd -P) # as find prints it: no link, no end /
newest=$(list | tail -n 1)
[ -n "$newest" ] || echo "$directory has no backup yet: is its disk mounted?" >&2
newest=${newest:-/dev/null}

# What a backup has left that was killed, or whose machine ended.
find "$directory" -maxdepth 1 -type f -name 'unfinished.??????' -mtime +1 -exec rm {} +
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
# The last name of all, also if the clock is behind: then a second after the newest.
stamp=$("$checkout/.venv/bin/python" -P -c '
import sys, time
from calendar import timegm
form, now = "%Y%m%dT%H%M%SZ", time.time()
try:
    now = max(now, 1 + timegm(time.strptime(sys.argv[1][-22:-6], form)))
except ValueError:  # there is none
    pass
print(time.strftime(form, time.gmtime(now)))' "$newest")
finished=$directory/plants-$stamp.jsonl
mv "$copy" "$finished"
sync "$directory"
echo "$finished: $verified"

list | grep -Fvx "$finished" | sort -r | tail -n "+$keep" | while read -r old; do
    rm "$old"
done
