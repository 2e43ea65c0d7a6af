#!/bin/bash
# A CSI plugin runs as a task. A volume is created and mounted into a task that writes and a task that reads, while
# the shim is replaced. Then everything is stopped, and the script proves that nothing is left behind.
#
#   BIN=bin examples/demo.sh                  as root: images on loop devices
#   BIN=bin unshare -Urm examples/demo.sh     without root: directories
#   LEAVE=mount|process|socket ...            a negative control: something is left on purpose; the exit code is 1
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "${BIN:-$here/../bin}" && pwd) || exit 2
for program in holdfast holdfast-shim loopfs; do
	[ -x "$bin/$program" ] || { echo "demo: $bin/$program is missing; run make build"; exit 2; }
done
export PATH="$bin:$PATH"

work=$(mktemp -d /tmp/hf-demo.XXXXXX) || exit 1
state=$work/state run=$work/run data=$work/data
mkdir "$data"
pid=
left=
failed=0

say() { printf '\n== %s\n' "$*"; }
bad() { printf 'LEFT BEHIND: %s\n' "$*"; failed=1; }
hf() { "$bin/holdfast" --address "$run/agent.sock" "$@"; }
end() {
	[ -n "$pid" ] && kill -TERM "$pid" 2>/dev/null && wait "$pid"
	[ -n "$left" ] && kill -KILL "$left" 2>/dev/null
	[ -n "${LEAVE:-}" ] && umount "$work/left" 2>/dev/null
	[ "$failed" = 0 ] || [ -n "${LEAVE:-}" ] && rm -rf --one-file-system "$work"
}
trap end EXIT

# within SECONDS COMMAND...: until the command succeeds.
within() {
	local limit=$((SECONDS + $1)); shift
	until "$@" >/dev/null 2>&1; do
		[ "$SECONDS" -lt "$limit" ] || { echo "demo: timed out waiting for: $*"; failed=1; return 1; }
		kill -0 "$pid" 2>/dev/null || { echo "demo: holdfast exited early"; failed=1; return 1; }
		sleep 0.1
	done
}

# alloc JOB: the id of its alloc.
alloc() { hf job status "$1" --json | sed -n 's/^ *"id": "\([0-9a-f]\{8\}-.*\)",\{0,1\}$/\1/p' | head -1; }

backend=dir
read -r _ _ mapped </proc/self/uid_map # all IDs: this is not a user namespace
if [ "$(id -u)" != 0 ]; then
	echo "demo: needs root, or: unshare -Urm $0"
	exit 2
elif [ "$mapped" != 4294967295 ]; then
	echo "Running in a user namespace without loop devices: loopfs stores volumes as directories."
elif losetup -f >/dev/null 2>&1 && command -v mkfs.ext4 >/dev/null; then
	backend=loop
	echo "Running as root: loopfs stores volumes as ext4 images on loop devices."
else
	echo "No loop devices or no mkfs.ext4: loopfs stores volumes as directories."
fi

say "1. Start holdfast, the shim and the plugin loopfs; create the volume 'notes'"
"$bin/holdfast" run --state-dir "$state" --run-dir "$run" --delete-volumes --var "loopfs=$bin/loopfs" --var "data=$data" --var "backend=$backend" \
	"$here/hcl/demo/loopfs.hcl" "$here/hcl/demo/notes.volume.hcl" >"$work/run.log" 2>&1 &
pid=$!
within 20 hf volume status notes || { cat "$work/run.log"; exit 1; }
cat "$work/run.log"

say "2. The plugin is healthy: one controller, one node"
hf plugin status loopfs

say "3. Run a job that reads from the volume: claim, stage, publish"
hf job run "$here/hcl/demo/reader.hcl"
running() { hf alloc status | grep -q "$1.*running"; }
within 20 running reader
hf volume status notes
echo
hf alloc status "$(alloc reader)"
echo
grep " $state/mnt/.*/v " /proc/self/mountinfo | sed 's/^/on the host: /'

say "4. Replace the shim while the reader has the volume mounted: tasks and mounts stay the same"
{ cat "$bin/holdfast-shim"; echo "Appended bytes change the digest of a program, not its behavior."; } >"$work/another-shim"
chmod 700 "$work/another-shim"
pid_of_shim() { hf shim status --json | sed -n 's/^ *"pid": \([0-9]*\),\{0,1\}$/\1/p'; }
untouched() { grep " $state/" /proc/self/mountinfo; hf alloc status --json | grep '"id"'; hf alloc status "$(alloc loopfs)" --json | grep '"pid"'; }
first=$(pid_of_shim) before=$(untouched)
hf shim swap "$work/another-shim" || failed=1
[ "$(untouched)" = "$before" ] || { echo "demo: a task or a mount has changed"; failed=1; }
[ "$(pid_of_shim)" != "$first" ] || { echo "demo: the shim is still pid $first"; failed=1; }

say "5. Run a job that writes to the volume, with the new shim"
hf job run --wait "$here/hcl/demo/writer.hcl"
complete() { hf alloc status | grep -q "$1.*complete"; }
within 20 complete writer
within 20 complete reader
echo "the writer saw:  $(hf alloc logs "$(alloc writer)" write)"
line=$(hf alloc logs "$(alloc reader)" read)
echo "the reader read: $line"
case $line in
"written through CSI by alloc $(alloc writer)") ;;
*) echo "demo: the reader read something else"; failed=1 ;;
esac

say "6. Events"
hf events

say "7. Stop everything: users of volumes first, then the plugin"
lines=$(wc -l <"$work/run.log")
tasks=$(hf alloc status "$(alloc loopfs)" --json | sed -n 's/^ *"pid": \([0-9]*\),\{0,1\}$/\1/p')
allocs=$(hf alloc status --json | sed -n 's/^ *"id": "\(.*\)",\{0,1\}$/HOLDFAST_TASK=\1/p')
shim="$first $(pid_of_shim)"
kill -TERM "$pid"
wait "$pid"
code=$?
tail -n +$((lines + 1)) "$work/run.log"
holdfast=$pid pid=
[ "$code" = 143 ] || { echo "demo: holdfast exited with code $code, not 143 (SIGTERM)"; failed=1; }

case ${LEAVE:-} in
mount) mkdir "$work/left" && mount -t tmpfs left "$work/left" ;;
process) tail -f "$work/run.log" >/dev/null & left=$! ;;
socket) python3 -c 'import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])' "$work/left.sock" ;;
esac

say "8. Check that nothing is left behind"
grep -F " $work/" /proc/self/mountinfo && bad "mounts"
# The directory of each plugin stays as long as the state directory; volumes have theirs below.
[ -z "$(find "$state/mnt" -mindepth 3 2>/dev/null)" ] || { find "$state/mnt" -mindepth 3; bad "directories of volumes"; }
[ -z "$(find "$work" -type s)" ] || { find "$work" -type s; bad "sockets"; }
[ -z "$(find "$run/t" -mindepth 1 2>/dev/null)" ] || { find "$run/t"; bad "socket directories"; }
[ -z "$(find "$data/volumes" -mindepth 1 2>/dev/null)" ] || { find "$data"; bad "data of the deleted volume"; }
losetup -a 2>/dev/null | grep -F "$data" && bad "loop devices"
for p in $holdfast $shim $tasks; do
	[ -e "/proc/$p" ] && { tr '\0' ' ' <"/proc/$p/cmdline"; bad "process $p"; }
done
for p in /proc/[0-9]*; do
	{ tr '\0' ' ' <"$p/cmdline" | grep -qF -- "$work"; } 2>/dev/null && { tr '\0' ' ' <"$p/cmdline"; bad "process $p"; }
	{ tr '\0' '\n' <"$p/environ" | grep -qF -- "$allocs"; } 2>/dev/null && { tr '\0' ' ' <"$p/cmdline"; bad "task $p"; }
done

if [ "$failed" = 0 ]; then
	echo "No mount, no directory, no socket, no loop device, no process. Done."
else
	echo "demo: failed; see $work"
fi
exit "$failed"
