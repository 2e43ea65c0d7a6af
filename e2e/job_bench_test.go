package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"holdfast/host/agent"
	"holdfast/host/agent/control"
)

// measuredJobs run one after another in each iteration of BenchmarkBatchJob.
const measuredJobs = 20

// BenchmarkBatchJob measures the processor time of a batch job with one volume, from its submission until its alloc is
// complete: in the agent, the shim, the plugin, and in the task with its parent process. The plugin loopfs mounts
// loop devices. The floor is the same calls straight to a loopfs, and the bare program of the task.
func BenchmarkBatchJob(b *testing.B) {
	m := newBenchMachine(b)
	floor := newFloor(b, m)
	m.runBatches(b, 3)
	b.ReportMetric(0, "ns/op")
	jobs := 0
	var sum jobCost
	var bare time.Duration
	for b.Loop() {
		before := m.cost(b)
		m.runBatches(b, measuredJobs)
		sum.add(m.cost(b), before)
		bare += floor.measure(b, measuredJobs)
		jobs += measuredJobs
		for i := range measuredJobs {
			mustB(b, m.stopAndWait(batchName(i), true))
		}
	}
	per := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / float64(jobs) }
	total := sum.agent + sum.shim + sum.plugin + sum.tasks
	for name, d := range map[string]time.Duration{
		"agent": sum.agent, "shim": sum.shim, "plugin": sum.plugin, "task": sum.tasks, "total": total, "floor": bare,
	} {
		b.ReportMetric(per(d), name+"-cpu-ms/job")
	}
	b.ReportMetric(total.Seconds()/bare.Seconds(), "total/floor")
}

// BenchmarkJobLatency measures the creation of a volume, and the stop of a service with one volume until the volume is
// free. The floor is the same calls straight to a loopfs, and the end of the same program.
func BenchmarkJobLatency(b *testing.B) {
	m := newBenchMachine(b)
	floor := newFloor(b, m)
	var create, createFloor, stop, stopFloor time.Duration
	for b.Loop() {
		create += m.createVolume(b, "made")
		mustB(b, m.client.DeleteVolume(b.Context(), volumeName("made")))
		createFloor += floor.create(b)

		alloc := m.submit(b, "service", "service", "/bin/sleep", "600")
		mustB(b, waitFor(b.Context(), "the task runs", func() bool {
			a, err := m.client.Alloc(b.Context(), alloc)
			return err == nil && a.Tasks[0].PID != 0
		}))
		begin := time.Now()
		mustB(b, m.stopAndWait("service", false))
		stop += time.Since(begin)
		mustB(b, m.stopAndWait("service", true))
		stopFloor += floor.stop(b)
	}
	b.ReportMetric(0, "ns/op")
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / float64(b.N) }
	b.ReportMetric(ms(create), "create-ms")
	b.ReportMetric(create.Seconds()/createFloor.Seconds(), "create/floor")
	b.ReportMetric(ms(stop), "stop-ms")
	b.ReportMetric(stop.Seconds()/stopFloor.Seconds(), "stop/floor")
}

// jobsAtOnce are submitted at the same time by BenchmarkJobsAtOnce, each with a volume of its own.
const jobsAtOnce = 30

// BenchmarkJobsAtOnce measures the time from the submission of batch jobs until all their allocs are complete. The
// floor is the same calls straight to a loopfs, and the bare program of the tasks, at the same time.
func BenchmarkJobsAtOnce(b *testing.B) {
	m := newBenchMachine(b)
	floor := newFloor(b, m)
	volume := func(i int) string { return fmt.Sprintf("disk-%d", i) }
	floors := make([]string, jobsAtOnce)
	for i := range floors {
		m.createVolume(b, volume(i))
		floors[i] = floor.createVolume(b, volume(i))
	}
	var took, bare time.Duration
	for b.Loop() {
		took += atOnce(b, func(i int) error {
			alloc, err := m.submitFor(batchName(i), "batch", volume(i), "/bin/true")
			return errors.Join(err, m.awaitCopy(b, alloc, `"state":"complete"`))
		})
		bare += atOnce(b, func(i int) error {
			dir := filepath.Join(floor.dir, volume(i))
			return errors.Join(floor.mount(b, floors[i], dir), exec.Command("/bin/true").Run(),
				floor.unmount(b, floors[i], dir))
		})
		atOnce(b, func(i int) error { return m.stopAndWait(batchName(i), true) })
	}
	for i := range jobsAtOnce {
		mustB(b, m.client.DeleteVolume(b.Context(), volumeName(volume(i))))
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(took.Seconds()*1000/float64(b.N), "30-jobs-ms")
	b.ReportMetric(took.Seconds()/bare.Seconds(), "30-jobs/floor")
}

// atOnce calls do for each job at the same time, and returns how long all of them take.
func atOnce(b *testing.B, do func(i int) error) time.Duration {
	b.Helper()
	var all errgroup.Group
	begin := time.Now()
	for i := range jobsAtOnce {
		all.Go(func() error { return do(i) })
	}
	mustB(b, all.Wait())
	return time.Since(begin)
}

// BenchmarkJobSyncs counts the calls of fsync and fdatasync in the agent, the shim and the task's parent while a job
// with one volume starts, and while it stops.
func BenchmarkJobSyncs(b *testing.B) {
	if _, err := exec.LookPath("strace"); err != nil {
		b.Skip("strace is not installed: apt-get install strace")
	}
	m := newBenchMachine(b)
	out := m.path("strace")
	strace := exec.Command("strace", "-f", "-y", "-e", "trace=fsync,fdatasync", "-o", out,
		"-p", fmt.Sprint(m.agent.Process.Pid), "-p", fmt.Sprint(m.shim))
	mustB(b, strace.Start())
	traced := func(pid int) bool {
		return !strings.Contains(procText(pid, "status"), "TracerPid:\t0\n")
	}
	mustB(b, waitFor(b.Context(), "strace is attached", func() bool {
		return traced(m.agent.Process.Pid) && traced(m.shim)
	}))
	starts, stops := map[string]int{}, map[string]int{}
	for b.Loop() {
		before := syncs(b, out)
		alloc := m.submit(b, "service", "service", "/bin/sleep", "600")
		mustB(b, waitFor(b.Context(), "the task runs", func() bool {
			a, err := m.client.Alloc(b.Context(), alloc)
			return err == nil && a.Tasks[0].PID != 0
		}))
		started := syncs(b, out)
		mustB(b, m.stopAndWait("service", false))
		stopped := syncs(b, out)
		mustB(b, m.stopAndWait("service", true))
		for file, n := range started {
			starts[file] += n - before[file]
			stops[file] += stopped[file] - n
		}
	}
	_ = strace.Process.Signal(unix.SIGTERM)
	_ = strace.Wait()
	b.ReportMetric(0, "ns/op")
	for what, counts := range map[string]map[string]int{"start": starts, "stop": stops} {
		total := 0
		for file, n := range counts {
			b.ReportMetric(float64(n)/float64(b.N), file+"-syncs/"+what)
			total += n
		}
		b.ReportMetric(float64(total)/float64(b.N), "syncs/"+what)
	}
}

var syncLine = regexp.MustCompile(`(?m)f(?:data)?sync\(\d+<([^>]*)>`)

// syncs returns the number of calls so far, by the name of the file, once it does not change any more.
func syncs(b *testing.B, out string) map[string]int {
	b.Helper()
	var last []byte
	for quiet := 0; quiet < 5; time.Sleep(50 * time.Millisecond) {
		text, err := os.ReadFile(out)
		mustB(b, err)
		if quiet++; len(text) != len(last) {
			quiet, last = 0, text
		}
	}
	counts := map[string]int{}
	for _, call := range syncLine.FindAllStringSubmatch(string(last), -1) {
		name := filepath.Base(call[1])
		switch filepath.Ext(name) {
		case ".db":
		default:
			name = "other"
		}
		counts[name]++
	}
	return counts
}

// benchMachine is a machine with a running loopfs and the volume "disk".
type benchMachine struct {
	*machine
	client       *control.Client
	shim, plugin int
}

func newBenchMachine(b *testing.B) *benchMachine {
	if os.Getuid() != 0 {
		b.Skip("real mounts need root")
	}
	made, err := newMachine()
	mustB(b, err)
	m := &benchMachine{machine: made, client: control.NewClient(made.socket())}
	b.Cleanup(func() { m.close(b) })
	mustB(b, m.startAgent())
	shims := shimsOf(m.state())
	if len(shims) != 1 {
		b.Fatalf("shims: %v", shims)
	}
	m.shim = shims[0]
	text, err := os.ReadFile("../examples/hcl/demo/loopfs.hcl")
	mustB(b, err)
	job, err := m.client.RunJob(b.Context(), control.Submission{
		Name: "loopfs.hcl", Text: text, Variables: map[string]string{
			"loopfs": filepath.Join(bin, "loopfs"), "data": m.path("data"), "backend": "loop",
		},
	}, agent.SubmitOptions{})
	mustB(b, err)
	m.createVolume(b, "disk")
	alloc, err := m.client.Alloc(b.Context(), job.Allocs[0].ID)
	mustB(b, err)
	m.plugin = alloc.Tasks[0].PID
	return m
}

// createVolume returns how long the creation of a volume takes.
func (m *benchMachine) createVolume(b *testing.B, id string) time.Duration {
	b.Helper()
	text, err := os.ReadFile("testdata/hcl/disk.volume.hcl")
	mustB(b, err)
	text = []byte(strings.NewReplacer(`"fake"`, `"loopfs"`, `"1MiB"`, `"16MiB"`, `"disk"`, strconv.Quote(id)).
		Replace(string(text)))
	begin := time.Now()
	_, err = m.client.CreateVolume(b.Context(), control.Submission{Name: id + ".volume.hcl", Text: text})
	mustB(b, err)
	return time.Since(begin)
}

func (m *benchMachine) close(b *testing.B) {
	var err error
	for _, id := range []string{"service", "loopfs"} {
		if id == "loopfs" {
			err = errors.Join(err, m.client.DeleteVolume(context.Background(), volumeName("disk")))
		}
		_ = m.stopAndWait(id, true)
	}
	err = errors.Join(err, m.endAgent(unix.SIGTERM))
	if err != nil || b.Failed() {
		b.Log(m.agentOutput())
	}
	mustB(b, errors.Join(err, m.sweep()))
}

// stopAndWait returns when the job's tasks have ended and its volumes are released.
func (m *benchMachine) stopAndWait(id string, purge bool) error {
	return errors.Join(m.client.StopJob(context.Background(), id, agent.StopOptions{Purge: purge}),
		m.client.AwaitStopped(context.Background(), id))
}

func batchName(i int) string { return fmt.Sprintf("batch-%d", i) }

// runBatches runs batch jobs one after another, each until its alloc is complete.
func (m *benchMachine) runBatches(b *testing.B, n int) {
	b.Helper()
	for i := range n {
		mustB(b, m.awaitCopy(b, m.submit(b, batchName(i), "batch", "/bin/true"), `"state":"complete"`))
	}
}

// submit submits a job that uses the volume "disk", and returns its alloc.
func (m *benchMachine) submit(b *testing.B, name, kind string, command ...string) string {
	b.Helper()
	alloc, err := m.submitFor(name, kind, "disk", command...)
	mustB(b, err)
	return alloc
}

func (m *benchMachine) submitFor(name, kind, volume string, command ...string) (alloc string, err error) {
	text, err := os.ReadFile("testdata/hcl/batch.hcl")
	if err != nil {
		return "", err
	}
	args := regexp.MustCompile(`(?m)^ +(command|args) += .*\n`)
	hcl := args.ReplaceAllString(string(text), "")
	hcl = strings.NewReplacer(`job "batch"`, fmt.Sprintf("job %q", name), `"batch"`, fmt.Sprintf("%q", kind),
		`= "disk"`, fmt.Sprintf("= %q", volume), `volume "disk"`, fmt.Sprintf("volume %q", volume),
		"config {", fmt.Sprintf("config {\n command = %q\n args = [%q]", command[0], strings.Join(command[1:], " ")),
	).Replace(hcl)
	job, err := m.client.RunJob(context.Background(), control.Submission{Name: name + ".hcl", Text: []byte(hcl)},
		agent.SubmitOptions{Rerun: true})
	if err != nil {
		return "", err
	}
	return job.Allocs[len(job.Allocs)-1].ID, nil
}

// awaitCopy waits until the copy of an alloc's record has a text. Reading that file costs the agent nothing.
func (m *benchMachine) awaitCopy(b *testing.B, alloc, want string) error {
	path := filepath.Join(m.state(), "agent/allocs", alloc, "alloc.json")
	return waitFor(b.Context(), want, func() bool {
		text, _ := os.ReadFile(path)
		return strings.Contains(string(text), want)
	})
}

// jobCost is processor time of a machine's programs.
type jobCost struct{ agent, shim, plugin, tasks time.Duration }

func (c *jobCost) add(now, before jobCost) {
	c.agent += now.agent - before.agent
	c.shim += now.shim - before.shim
	c.plugin += now.plugin - before.plugin
	c.tasks += now.tasks - before.tasks
}

// cost returns the processor time so far. The tasks and their parents are the children that the agent has waited for.
func (m *benchMachine) cost(b *testing.B) jobCost {
	b.Helper()
	pid := m.agent.Process.Pid
	return jobCost{
		agent: processorTime(b, pid), tasks: childrenTime(b, pid),
		shim:   processorTime(b, m.shim) + childrenTime(b, m.shim),
		plugin: processorTime(b, m.plugin) + childrenTime(b, m.plugin),
	}
}

// childrenTime returns the processor time of the children that a process has waited for, to a hundredth of a second.
func childrenTime(b *testing.B, pid int) time.Duration {
	b.Helper()
	text := procText(pid, "stat")
	fields := strings.Fields(text[strings.LastIndex(text, ")")+1:]) // from field 3
	var user, system int64
	_, err := fmt.Sscan(fields[13]+" "+fields[14], &user, &system)
	mustB(b, err)
	return time.Duration(user+system) * (time.Second / 100)
}

// floor is a loopfs that is called straight.
type floor struct {
	plugin *exec.Cmd
	conn   *grpc.ClientConn
	volume string
	dir    string
}

func newFloor(b *testing.B, m *benchMachine) *floor {
	b.Helper()
	f := &floor{dir: m.path("data/floor")}
	mustB(b, os.Mkdir(f.dir, 0o700))
	socket := m.path("r/floor.sock")
	f.plugin = exec.Command(filepath.Join(bin, "loopfs"), "--data="+filepath.Join(f.dir, "data"), "--backend=loop",
		"--node-id=node-1", "--endpoint=unix://"+socket)
	mustB(b, f.plugin.Start())
	b.Cleanup(func() {
		_ = f.plugin.Process.Signal(unix.SIGTERM)
		_ = f.plugin.Wait()
	})
	f.conn = dialCSI(b, socket)
	f.volume = f.createVolume(b, "disk")
	return f
}

func (f *floor) createVolume(b *testing.B, name string) (id string) {
	b.Helper()
	reply, err := csi.NewControllerClient(f.conn).CreateVolume(b.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 16 << 20},
		VolumeCapabilities: []*csi.VolumeCapability{f.capability()},
	}, grpc.WaitForReady(true))
	mustB(b, err)
	return reply.Volume.VolumeId
}

// create returns how long the creation of a volume takes.
func (f *floor) create(b *testing.B) time.Duration {
	b.Helper()
	begin := time.Now()
	id := f.createVolume(b, "made")
	took := time.Since(begin)
	_, err := csi.NewControllerClient(f.conn).DeleteVolume(b.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	mustB(b, err)
	return took
}

// stop returns how long it takes to end a program and to take down its volume.
func (f *floor) stop(b *testing.B) time.Duration {
	b.Helper()
	mustB(b, f.mount(b, f.volume, f.dir))
	program := exec.Command("/bin/sleep", "600")
	mustB(b, program.Start())
	begin := time.Now()
	mustB(b, program.Process.Signal(unix.SIGTERM))
	_ = program.Wait()
	mustB(b, f.unmount(b, f.volume, f.dir))
	return time.Since(begin)
}

// mount stages and publishes a volume below dir.
func (f *floor) mount(b *testing.B, volume, dir string) error {
	node := csi.NewNodeClient(f.conn)
	stage, publish := filepath.Join(dir, "stage"), filepath.Join(dir, "publish")
	if err := errors.Join(os.MkdirAll(stage, 0o700), os.MkdirAll(publish, 0o700)); err != nil {
		return err
	}
	_, err := node.NodeStageVolume(b.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: volume, StagingTargetPath: stage, VolumeCapability: f.capability(),
	})
	if err != nil {
		return err
	}
	_, err = node.NodePublishVolume(b.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: volume, StagingTargetPath: stage, TargetPath: publish + "/v", VolumeCapability: f.capability(),
	})
	return err
}

func (f *floor) unmount(b *testing.B, volume, dir string) error {
	node := csi.NewNodeClient(f.conn)
	_, err := node.NodeUnpublishVolume(b.Context(), &csi.NodeUnpublishVolumeRequest{
		VolumeId: volume, TargetPath: filepath.Join(dir, "publish/v"),
	})
	if err != nil {
		return err
	}
	_, err = node.NodeUnstageVolume(b.Context(), &csi.NodeUnstageVolumeRequest{
		VolumeId: volume, StagingTargetPath: filepath.Join(dir, "stage"),
	})
	return err
}

func (f *floor) capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
}

// measure makes the calls and runs the program of n jobs, and returns the processor time.
func (f *floor) measure(b *testing.B, n int) time.Duration {
	b.Helper()
	cost := func() time.Duration {
		pid := f.plugin.Process.Pid
		return processorTime(b, pid) + childrenTime(b, pid) + processorTime(b, 0) + childrenTime(b, os.Getpid())
	}
	before := cost()
	for range n {
		mustB(b, f.mount(b, f.volume, f.dir))
		mustB(b, exec.Command("/bin/true").Run())
		mustB(b, f.unmount(b, f.volume, f.dir))
	}
	return cost() - before
}

func mustB(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}
