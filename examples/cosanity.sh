#!/bin/bash
# Runs cosanity scenarios against Holdfast: the plugin is a task, volumes are used, and the judge reads the calls.
#
#   BIN=bin examples/cosanity.sh [SCENARIO...]     as root; without names: every scenario
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "${BIN:-$here/../bin}" && pwd) || exit 2
for program in holdfast holdfast-shim cosanity; do
	[ -x "$bin/$program" ] || { echo "cosanity: $bin/$program is missing; run make cosanity"; exit 2; }
done

work=$(mktemp -d /tmp/hf-co.XXXXXX) || exit 1
pids=()
end() {
	for p in "${pids[@]}"; do kill -TERM "$p" 2>/dev/null && wait "$p"; done
	rm -rf --one-file-system "$work"
}
trap end EXIT
hf() { "$bin/holdfast" --address "$dir/run/agent.sock" "$@"; }

files() {
	cat >"$dir/plugin.hcl" <<-EOF
		job "cosanity" {
		  group "plugin" {
		    task "cosanity" {
		      driver = "exec"
		      config {
		        command = "$bin/cosanity"
		        args    = ["plugin", "-dir=$dir", "$1"]
		      }
		      csi_plugin {
		        id             = "cosanity"
		        type           = "monolith"
		        health_timeout = "${health:-60s}"
		      }
		      restart {
		        attempts = 10
		        delay    = "100ms"
		        interval = "1h"
		        mode     = "fail"
		      }
		    }
		  }
		}
	EOF
	for volume in one two; do
		cat >"$dir/$volume.hcl" <<-EOF
			id           = "$volume"
			plugin_id    = "cosanity"
			capacity_min = "1MiB"
			capability {
			  access_mode     = "single-node-writer"
			  attachment_mode = "file-system"
			}
			$([ "$1" = secrets ] && echo 'secrets {
			  user      = "ada"
			  api-key_1 = "tops3cret"
			}')
		EOF
		cat >"$dir/$volume-job.hcl" <<-EOF
			job "$volume" {
			  type = "batch"
			  group "g" {
			    volume "v" {
			      type            = "csi"
			      source          = "$volume"
			      access_mode     = "single-node-writer"
			      attachment_mode = "file-system"
			    }
			    task "t" {
			      driver = "exec"
			      config {
			        command = "/bin/sh"
			        args    = ["-c", "echo $volume >>/v/f && cat /v/f"]
			      }
			      volume_mount {
			        volume      = "v"
			        destination = "/v"
			      }
			    }
			  }
			}
		EOF
	done
	sed 's/"one"/"three"/; s/-writer/-reader-only/' "$dir/one.hcl" >"$dir/three.hcl"
	sed 's/"one"/"three"/; s/-writer/-reader-only/; s/echo .*cat/ls/; s/\/v\/f/\/v/
		/access_mode/a read_only = true' "$dir/one-job.hcl" >"$dir/three-job.hcl"
	sed 's/"one"/"existing"/; /capacity_min/s/.*/external_id = "existing"/' "$dir/one.hcl" >"$dir/existing.hcl"
}

# use makes each call that the scenario is about.
use() {
	for volume in one two; do
		hf volume create "$dir/$volume.hcl" || return
		hf job run --wait "$dir/$volume-job.hcl" || return
	done
	case $1 in
	normal | lists)
		hf snapshot create one s1 && hf snapshot create one s2 && hf snapshot list --external cosanity &&
			hf snapshot delete s1 && hf snapshot delete s2 && hf doctor || return
		;;&
	readers)
		hf volume create "$dir/three.hcl" && hf job run --wait "$dir/three-job.hcl" &&
			hf job stop --purge --wait three && hf volume delete three || return
		;;
	denied)
		hf volume register "$dir/existing.hcl" && return 1
		;;
	groups)
		hf group-snapshot create g one two && hf group-snapshot delete g || return
		;;
	blocks)
		hf snapshot create one s1 && hf job run --wait --rerun "$dir/one-job.hcl" && hf snapshot create one s2 &&
			hf snapshot diff s1 && hf snapshot diff s1 s2 && hf snapshot delete s1 && hf snapshot delete s2 || return
		;;
	normal | offline)
		hf volume expand one --size 2MiB && hf job run --wait "$dir/one-job.hcl" || return
		;;
	esac
	for volume in one two; do
		hf job stop --purge --wait "$volume"
		hf volume delete "$volume" || return
	done
}

# scenario NAME runs one scenario in $work/NAME.
scenario() {
	dir=$work/$1 health=
	mkdir "$dir"
	[ "$1" = name ] && health=2s
	files "$1"
	"$bin/holdfast" run --state-dir "$dir/state" --run-dir "$dir/run" "$dir/plugin.hcl" >"$dir/log" 2>&1 &
	pid=$!
	trap 'kill -TERM "$pid"' TERM
	for _ in $(seq 600); do hf plugin status cosanity >/dev/null 2>&1 && break; sleep 0.1; done
	use "$1" >>"$dir/log" 2>&1
	used=$?
	kill -TERM "$pid" && wait "$pid"
	# A plugin with a forbidden name must not be used; every other must.
	if [ "$1" = name ] && [ $used = 0 ] || [ "$1" != name ] && [ $used != 0 ]; then
		echo "scenario $1: the calls ended with exit code $used"
		tail -20 "$dir/log"
		return 1
	fi
}

all=
[ $# -gt 0 ] || { all=1; set -- $("$bin/cosanity" scenarios | cut -d' ' -f1); }
failed=0
for name; do
	scenario "$name" &
	pids+=($!)
done
for p in "${pids[@]}"; do wait "$p" || failed=1; done
"$bin/cosanity" judge "${@/#/$work/}" >"$work/verdicts" || failed=1
cat "$work/verdicts"
[ -z "$all" ] || grep -q ', 0 not exercised$' "$work/verdicts" || failed=1
exit $failed
