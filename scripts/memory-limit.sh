#!/bin/sh
# Runs a command under a hard limit of memory, page cache included:
#
#   scripts/memory-limit.sh 2600M target/release/ebbtide bench --batch 8 --policy 'offload disk'
#
# A process that needs more is killed by the system. Through systemd where there is a user session, else, as root, by a control
# group of its own (version 1 or 2). Prints the peak where it can be read.
set -eu
limit=$1
shift
if systemd-run --user --scope -q true 2>/dev/null; then
    exec systemd-run --user --scope -q -p MemoryMax="$limit" -p MemorySwapMax=0 "$@"
fi
if [ -d /sys/fs/cgroup/memory ]; then
    group=/sys/fs/cgroup/memory/ebbtide-$$
    bound=memory.limit_in_bytes peak=memory.max_usage_in_bytes
else
    group=/sys/fs/cgroup/ebbtide-$$
    bound=memory.max peak=memory.peak
fi
mkdir "$group"
trap 'cat "$group/$peak" 2>/dev/null | sed "s/^/peak of the group in bytes: /" >&2; rmdir "$group"' EXIT
echo "$limit" >"$group/$bound"
status=0
sh -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group" "$@" || status=$?
exit $status
