package e2e

import (
	"errors"
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

// blockJob is a job whose task has the volume of its own name at /dev/own. It runs a script of the machine, then waits for a file.
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

// blockScript tells in the file $1.said what came of each try, and ends when there is a file $1.finish. The devices that it tries beside
// its own are in the file $1.others: at a node of its own making, and at the host's.
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
mv $out $1.said
until [ -e $1.finish ]; do sleep 0.05; done
`

// A task can use the block device that it mounts, in the way that it asked for, and not those of others, though it is root: the device's
// rule is part of what its alloc is prepared with, and is applied.
func TestDefectV10BlockDeviceIsAllowedToItsTaskAlone(t *testing.T) {
	s := newStation(t)
	needLoop(t)
	s.must(s.submit("fake.hcl"))
	s.must(os.WriteFile(s.path("script.sh"), []byte(blockScript), 0o600))
	others := ""
	for _, c := range []struct {
		volume   string
		readOnly bool
		said     []string
	}{
		{"first", false, []string{"read own: done", "write own: done"}},
		{"second", false, []string{
			"read own: done", "write own: done", "read another: refused", "write another: refused", "write another of the host: refused",
		}},
		{"third", true, []string{
			"read own: done", "write own: refused", "read another: refused", "write another: refused", "write another of the host: refused",
			"read another: refused", "write another: refused", "write another of the host: refused",
		}},
	} {
		s.must(s.createBlock(c.volume))
		s.must(os.WriteFile(s.path(c.volume+".others"), []byte(others), 0o600))
		before := loopDevices(s.dir)
		s.must(s.runText(c.volume+".hcl", fmt.Sprintf(blockJob, c.volume, s.dir, c.readOnly)))
		s.wait("the task of "+c.volume+" has tried everything", func() bool { return exists(s.path(c.volume + ".said")) })
		said, _ := os.ReadFile(s.path(c.volume + ".said"))
		if got := strings.Split(strings.TrimSpace(string(said)), "\n"); !slices.Equal(got, c.said) {
			errs, _ := os.ReadFile(s.path(c.volume + ".part.errors"))
			t.Errorf("%s: %q, not %q\n%s", c.volume, got, c.said, errs)
		}
		for _, dev := range loopDevices(s.dir) {
			if !slices.Contains(before, dev) {
				others += fmt.Sprintf("7:%s %s\n", strings.TrimPrefix(dev, "/dev/loop"), dev)
				s.deviceBegins(dev, c.volume, c.readOnly)
			}
		}
	}
	if n := strings.Count(others, "\n"); n != 3 {
		t.Errorf("three volumes have %d devices", n)
	}
	for _, volume := range []string{"first", "second", "third"} {
		s.must(os.WriteFile(s.path(volume+".finish"), nil, 0o600))
		s.must(s.stop(volume))
		s.must(s.delete(volume))
	}
	s.must(s.stop("fake"))
}

// needLoop skips where the plugin can make no block device.
func needLoop(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("losetup", "--find").CombinedOutput(); err != nil {
		t.Skipf("there are no loop devices here: %v: %s", err, out)
	}
}

// deviceBegins looks at what a task has left on its device.
func (s *station) deviceBegins(dev, job string, readOnly bool) {
	s.t.Helper()
	f, err := os.Open(dev)
	s.must(err)
	defer f.Close()
	text := make([]byte, 64)
	_, err = f.Read(text)
	s.must(err)
	if written := strings.HasPrefix(string(text), "written by "+job+" "); written == readOnly {
		s.t.Errorf("%s begins with %q", dev, text)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, os.ErrNotExist)
}

// createBlock makes a volume of the scripted plugin that is a block device.
func (s *station) createBlock(id string) error {
	return s.insist("create "+id, func() error {
		_, err := s.client.CreateVolume(s.ctx(), control.Submission{Name: id + ".volume.hcl", Text: []byte(fmt.Sprintf(blockVolume, id))})
		return err
	})
}

// runText runs a job.
func (s *station) runText(name, text string) error {
	return s.insist("run "+name, func() error {
		_, err := s.client.RunJob(s.ctx(), control.Submission{Name: name, Text: []byte(text)}, false)
		return err
	})
}
