package sanity

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
)

// taskVariable makes this program a run of csi-sanity.
const taskVariable = "LOOPFS_SANITY_TASK"

// task is a run of csi-sanity: its directory, and loopfs with the other programs beside it.
type task struct {
	Configuration configuration
	Dir, Binary   string
}

func TestMain(m *testing.M) {
	text := os.Getenv(taskVariable)
	if text == "" {
		os.Exit(m.Run())
	}
	flag.Parse()
	var job task
	err := json.Unmarshal([]byte(text), &job)
	if err == nil {
		err = job.run()
	}
	if err != nil {
		fmt.Println("FAIL:", err)
		os.Exit(1)
	}
}

// failure records that a spec failed.
type failure bool

func (f *failure) Fail() { *f = true }

func (j task) run() error {
	work := filepath.Join(j.Dir, "work")
	if err := os.Mkdir(work, 0o755); err != nil {
		return err
	}
	config := sanity.NewTestConfig()
	config.TargetPath, config.StagingPath = filepath.Join(work, "target"), filepath.Join(work, "staging")
	config.TestVolumeSize, config.TestVolumeExpandSize = j.Configuration.Size, j.Configuration.Larger
	config.TestVolumeMutableParameters = map[string]string{"readahead": "512"}
	config.TestNodeVolumeAttachLimit = j.Configuration.Limited
	if j.Configuration.Mutable {
		config.TestVolumeMutableParameters = map[string]string{"speed": "fast"}
	}
	if j.Configuration.Access != "" {
		config.TestVolumeAccessType = j.Configuration.Access
	}
	config.Address = j.address()
	end, err := j.startDriver()
	if err != nil {
		return err
	}
	var failed failure
	sanity.Test(&failed, config)
	if err := end(); err != nil {
		return err
	}
	if bool(failed) && !j.Configuration.MayFail {
		return fmt.Errorf("a spec failed; the driver said:\n%s", j.log())
	}
	if j.Configuration.Driver != "" {
		return nil
	}
	return j.nothingLeft(work)
}

// startDriver starts the driver, or holdfast with the driver as a plugin. It returns how to end it.
func (j task) startDriver() (end func() error, err error) {
	if j.Configuration.Endpoint {
		e, err := j.startEndpoint()
		if err != nil {
			return nil, err
		}
		return e.end, nil
	}
	cmd, err := j.start()
	return func() error { return stop(cmd) }, err
}

func (j task) socket() string  { return filepath.Join(j.Dir, "csi.sock") }
func (j task) address() string { return "unix://" + j.socket() }

// command returns how to start the driver, which reads its socket from CSI_ENDPOINT.
func (j task) command() []string {
	if j.Configuration.Driver == "" {
		return slices.Concat([]string{j.Binary}, j.Configuration.Args, []string{"--node-id=n1", "--capacity=64GiB",
			"--data=" + filepath.Join(j.Dir, "data")})
	}
	command := []string{j.program(j.Configuration.Driver)}
	for _, arg := range j.Configuration.Args {
		command = append(command, strings.ReplaceAll(arg, "DIR", j.Dir))
	}
	return command
}

// start starts the driver and waits until it serves.
func (j task) start() (*exec.Cmd, error) {
	log, err := os.OpenFile(filepath.Join(j.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	command := j.command()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "CSI_ENDPOINT="+j.address())
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		conn, err := net.Dial("unix", j.socket())
		if err == nil {
			return cmd, conn.Close()
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("the driver does not serve: %w\n%s", err, j.log())
		}
	}
}

func stop(cmd *exec.Cmd) error {
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return cmd.Wait()
}

func (j task) log() string {
	text, err := os.ReadFile(filepath.Join(j.Dir, "log"))
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// nothingLeft returns an error about what csi-sanity or loopfs left behind.
func (j task) nothingLeft(work string) error {
	table, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer table.Close()
	if line, err := grep(table, j.Dir); line != "" || err != nil {
		return fmt.Errorf("still mounted: %s, %w", line, err)
	}
	devices, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, d := range devices {
		if name, err := os.ReadFile(d); err == nil && strings.HasPrefix(string(name), j.Dir) {
			return fmt.Errorf("still attached: %s is %s", d, name)
		}
	}
	for _, dir := range []string{work, "data/volumes"} {
		if !filepath.IsAbs(dir) {
			dir = filepath.Join(j.Dir, dir)
		}
		if entries, err := os.ReadDir(dir); len(entries) > 0 || err != nil {
			return fmt.Errorf("%s still holds %v, %v", dir, entries, err)
		}
	}
	return nil
}

func grep(r io.Reader, word string) (string, error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if strings.Contains(lines.Text(), word) {
			return lines.Text(), nil
		}
	}
	return "", lines.Err()
}
