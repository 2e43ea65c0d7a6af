package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"holdfast/host/agent/control"
)

// blockVolume is a volume that is a block device.
const blockVolume = `
id           = %q
type         = "csi"
plugin_id    = "fake"
capacity_min = "1MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "block-device"
}
`

// blockJob has a task with the volume of the job's name at /dev/own. It runs a script of the machine.
const blockJob = `
job %[1]q {
  type = "batch"

  group "g" {
    volume "own" {
      type            = "csi"
      source          = %[1]q
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
      read_only       = %[3]t
    }

    task "t" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args    = ["%[2]s/script.sh", "%[2]s/%[1]s"]
      }

      volume_mount {
        volume      = "own"
        destination = "/dev/own"
      }
    }
  }
}
`

// blockScript writes to $1.results what came of each try, and exits when $1.finish exists. $1.others names devices of
// other tasks, which it tries at a node that it makes and at the host's.
const blockScript = `
try() { what=$1; shift; if "$@" 2>>$out.errors; then echo "$what: done"; else echo "$what: refused"; fi >>$out; }
out=$1.part
try "read own" dd if=/dev/own of=/dev/null bs=512 count=1
try "write own" sh -c 'printf "%-512s" "written by '${1##*/}'" | dd of=/dev/own bs=512 conv=fsync'
while read -r number name; do
	mknod /local/other b ${number%:*} ${number#*:} 2>>$out.errors
	try "read another" dd if=/local/other of=/dev/null bs=512 count=1
	try "write another" dd if=/dev/zero of=/local/other bs=512 count=1
	try "write another of the host" dd if=/dev/zero of=$name bs=512 count=1
done <$1.others
mv $out $1.results
until [ -e $1.finish ]; do sleep 0.05; done
`

// A task can use the block device that it mounts, with the access that it requested, and no other task's device,
// though it is root.
func TestDefectV10BlockDeviceIsAllowedToItsTaskAlone(t *testing.T) {
	a := newAgentEnv(t)
	if out, err := exec.Command("losetup", "--find").CombinedOutput(); err != nil {
		t.Skipf("there are no loop devices here: %v: %s", err, out)
	}
	a.must(a.runJob("fake.hcl"))
	a.must(os.WriteFile(a.path("script.sh"), []byte(blockScript), 0o600))
	others := ""
	denied := []string{"read another: refused", "write another: refused", "write another of the host: refused"}
	for _, c := range []struct {
		volume   string
		readOnly bool
		results  []string
	}{
		{"first", false, []string{"read own: done", "write own: done"}},
		{"second", false, slices.Concat([]string{"read own: done", "write own: done"}, denied)},
		{"third", true, slices.Concat([]string{"read own: done", "write own: refused"}, denied, denied)},
	} {
		volume := control.Submission{Name: c.volume + ".volume.hcl", Text: fmt.Appendf(nil, blockVolume, c.volume)}
		a.must(a.retry("create "+c.volume, func() error { return errOf(a.client.CreateVolume(a.ctx(), volume)) }))
		a.must(os.WriteFile(a.path(c.volume+".others"), []byte(others), 0o600))
		before := loopDevices(a.dir)
		job := control.Submission{Name: c.volume + ".hcl",
			Text: fmt.Appendf(nil, blockJob, c.volume, a.dir, c.readOnly)}
		a.must(a.runSubmission(job))
		results := a.path(c.volume + ".results")
		a.waitUntil("the task of "+c.volume+" has tried everything", func() bool { return exists(results) })
		text, err := os.ReadFile(results)
		a.must(err)
		if got := strings.Split(strings.TrimSpace(string(text)), "\n"); !slices.Equal(got, c.results) {
			errs, _ := os.ReadFile(a.path(c.volume + ".part.errors"))
			t.Errorf("%s: %q, not %q\n%s", c.volume, got, c.results, errs)
		}
		for _, dev := range loopDevices(a.dir) {
			if slices.Contains(before, dev) {
				continue
			}
			others += fmt.Sprintf("7:%s %s\n", strings.TrimPrefix(dev, "/dev/loop"), dev)
			content := make([]byte, 64)
			f, err := os.Open(dev)
			a.must(err)
			_, err = f.Read(content)
			a.must(err)
			f.Close()
			if written := strings.HasPrefix(string(content), "written by "+c.volume+" "); written == c.readOnly {
				t.Errorf("%s begins with %q", dev, content)
			}
		}
	}
	if n := strings.Count(others, "\n"); n != 3 {
		t.Errorf("three volumes have %d devices", n)
	}
	for _, volume := range []string{"first", "second", "third"} {
		a.must(os.WriteFile(a.path(volume+".finish"), nil, 0o600))
		a.must(a.stopJob(volume))
		a.must(a.delete(volume))
	}
	a.must(a.stopJob("fake"))
}
