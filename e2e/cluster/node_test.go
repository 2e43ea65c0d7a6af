package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/host"
	"holdfast/internal/proc"
)

// nodeConfig configures a node process. This process is a small orchestrator that runs a plugin, and whose workers use
// volumes until its input ends. If it is killed, another process with the same nodeConfig continues.
type nodeConfig struct {
	Name, Dir string
	Shims     []string // the first one runs first; the node swaps through all of them
	CSIFake   string   // path of the program
	Cluster   string   // HCL
	History   string   // path of the file
	Journal   string   // shared by all plugins
	Backend   string   // shared by all plugins
	Data      string   // the data of all volumes
	Killed    string   // has a directory for each node that may be fenced
	Volumes   int
	Workers   int
	Seed      uint64
}

// modes are the access modes. A volume has two of them.
var modes = []string{
	"single-node-writer", "single-node-reader-only", "single-node-single-writer", "single-node-multi-writer",
	"multi-node-reader-only", "multi-node-single-writer", "multi-node-multi-writer",
}

// modesOf returns the access modes of a volume.
func modesOf(volume int) []string {
	return []string{modes[volume%len(modes)], modes[(volume+3)%len(modes)]}
}

func volumeID(n int) string { return fmt.Sprintf("v%d", n) }

// writesFile is the file in a volume to which its users write.
const writesFile = "writes"

// callLimit bounds one try of a call. The call is repeated until it succeeds.
const callLimit = 20 * time.Second

type node struct {
	nodeConfig
	history *os.File
	host    *host.Host
	random  *rand.Rand // for the main goroutine only
	turns   *turns
}

func nodeMain(path string) int {
	n := &node{}
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &n.nodeConfig)
	}
	if err == nil {
		err = n.run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (n *node) note(l line) {
	l.Node = n.Name
	text, err := json.Marshal(l)
	if err == nil {
		_, err = n.history.Write(append(text, '\n'))
	}
	if err != nil {
		panic(err)
	}
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func (n *node) run() (err error) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	if n.history, err = os.OpenFile(n.History, os.O_WRONLY|os.O_APPEND, 0); err != nil {
		return err
	}
	lines, _, err := readHistory(n.History, 0)
	if err != nil {
		return err
	}
	n.random = rand.New(rand.NewPCG(n.Seed, uint64(len(lines))))
	left, made := n.left(lines)
	task, running, err := n.plugin()
	if err != nil {
		return err
	}
	config, err := n.hostConfig(task, running, left)
	if err != nil {
		return err
	}
	if n.host, err = host.Open(ctx, config); err != nil {
		return err
	}
	if !running {
		if task, err = n.startPlugin(ctx, task); err != nil {
			return err
		}
	}
	n.turns = newTurns(n.Volumes)
	n.note(line{Kind: ready})
	return n.serve(ctx, task, left, made)
}

// hostConfig returns the host's configuration. It includes the allocs and the task that an earlier process has left.
func (n *node) hostConfig(task host.AllocTask, running bool, left []line) (config host.Config, err error) {
	config = host.Config{
		StateDir: filepath.Join(n.Dir, "state"), RunDir: filepath.Join(n.Dir, "run"), Node: n.Name, Cluster: n.Cluster,
		Shim: host.Binary{Path: n.Shims[0]}, Bake: 50 * time.Millisecond, MaxHold: time.Minute, SwapBudget: time.Minute,
		Logger: hclog.New(&hclog.LoggerOptions{Output: os.Stderr, Level: hclog.Info}),
		Fence: func(_ context.Context, node string) error {
			_, err := os.Stat(filepath.Join(n.Killed, node))
			return err
		},
	}
	for _, l := range left {
		if l.Kind != releaseBegins {
			config.Workload.Allocs = append(config.Workload.Allocs, group(l))
		}
	}
	if running {
		boot, err := proc.BootID()
		if err != nil {
			return config, err
		}
		config.Workload.Tasks = []host.WorkloadTask{{AllocTask: task, Running: true,
			Started: host.BootTime{Boot: boot}}}
	}
	return config, nil
}

// serve carries out the commands in the lines of the input.
func (n *node) serve(ctx context.Context, task host.AllocTask, left []line, made int) error {
	working, stopWorking := context.WithCancel(ctx)
	defer stopWorking()
	swapping, stopSwapping := context.WithCancel(ctx)
	defer stopSwapping()
	var all sync.WaitGroup
	for commands := bufio.NewScanner(os.Stdin); commands.Scan(); {
		word, node, _ := strings.Cut(commands.Text(), ": ")
		switch word {
		case "declare":
			n.persist(ctx, "declare", func(ctx context.Context) error {
				_, err := n.host.NodeOutOfService(ctx, host.NodeName(node), host.OutOfServiceOptions{
					By: "harness", Reason: "all that ran there was killed", Confirm: host.NodeName(node)})
				return err
			})
			n.note(line{Kind: declared})
		case "await fence of":
			n.persist(ctx, "fence", func(ctx context.Context) error { return n.lost(ctx, host.NodeName(node)) })
			n.note(line{Kind: declared})
		case "create":
			n.create(ctx)
		case "work":
			go n.swap(swapping)
			go n.turns.follow(working, n.host)
			n.work(ctx, working, &all, left, made)
		case "stop":
			stopWorking()
			all.Wait()
			stopSwapping()
			n.note(line{Kind: stopped})
		case "verify":
			n.note(line{Kind: verified, Error: textOf(n.verify(ctx))})
		case "delete":
			n.delete(ctx)
		case "end":
			return n.end(ctx, task)
		}
	}
	return errors.New("the input has ended")
}

// work starts the workers. They continue with the allocs that are left, and begin new ones until working ends.
func (n *node) work(ctx, working context.Context, all *sync.WaitGroup, left []line, made int) {
	for i := range max(n.Workers, len(left)) {
		w := worker{node: n, random: rand.New(rand.NewPCG(n.Seed, n.random.Uint64()))}
		all.Go(func() {
			if i < len(left) {
				w.continued(ctx, working, left[i])
			}
			for a := 0; working.Err() == nil && i < n.Workers; a++ {
				w.use(ctx, working, fmt.Sprintf("%s-%d-%d-%d", n.Name, made, i, a))
			}
		})
	}
}

func (n *node) create(ctx context.Context) {
	for i := range n.Volumes {
		text := fmt.Sprintf("id = %q\nname = %q\ntype = \"csi\"\nplugin_id = \"fake\"\ncapacity_min = \"1MiB\"\n",
			volumeID(i), volumeID(i))
		for _, mode := range modesOf(i) {
			text += fmt.Sprintf("capability {\n access_mode = %q\n attachment_mode = \"file-system\"\n}\n", mode)
		}
		n.persist(ctx, "create", func(ctx context.Context) error {
			spec, _, err := n.host.ParseVolume(ctx, host.Source{Name: "volume.hcl", Text: []byte(text)},
				host.ParseOptions{})
			if err == nil {
				_, err = n.host.CreateVolume(ctx, spec)
			}
			return err
		})
	}
	n.note(line{Kind: created})
}

// lost returns nil if the node was fenced or declared out of service.
func (n *node) lost(ctx context.Context, node host.NodeName) error {
	nodes, _, err := n.host.Nodes(ctx, host.NodeQuery{Node: node})
	if err == nil && (len(nodes) != 1 || nodes[0].State != host.NodeFenced && nodes[0].State != host.NodeOutOfService) {
		err = fmt.Errorf("%w: not yet: %+v", host.ErrUnavailable, nodes)
	}
	return err
}

func (n *node) delete(ctx context.Context) {
	for i := range n.Volumes {
		n.persist(ctx, "delete", func(ctx context.Context) error {
			err := n.host.DeleteVolume(ctx, host.VolumeName{Namespace: "default", ID: host.VolumeID(volumeID(i))})
			if errors.Is(err, host.ErrNotFound) {
				return nil
			}
			return err
		})
	}
	n.note(line{Kind: deleted})
}

// end stops the plugin and closes the host.
func (n *node) end(ctx context.Context, task host.AllocTask) error {
	pid, err := n.pluginPID()
	if err == nil {
		err = syscall.Kill(pid, syscall.SIGTERM)
	}
	for err == nil && alive(pid) {
		time.Sleep(10 * time.Millisecond)
	}
	return errors.Join(err, n.host.TaskExited(ctx, task.Key(), task.Attempt, 0, 0, true), n.host.Close())
}

// left returns the last line of each unreleased alloc of this node, and how many lines this node has written.
func (n *node) left(lines []line) (left []line, made int) {
	last := map[string]line{}
	var order []string
	for _, l := range lines {
		if l.Node != n.Name {
			continue
		}
		made++
		if l.Kind == lost {
			for alloc, was := range last {
				if was.Kind != releaseEnded {
					was.Kind = releaseBegins
					last[alloc] = was
				}
			}
		}
		if l.Alloc == "" {
			continue
		}
		was, known := last[l.Alloc]
		if !known {
			order = append(order, l.Alloc)
			was = l
		}
		if l.Kind == releaseEnded && l.Error != "" {
			l.Kind = releaseBegins
		}
		was.Kind, was.Error = l.Kind, l.Error
		last[l.Alloc] = was
	}
	for _, alloc := range order {
		if last[alloc].Kind != releaseEnded {
			left = append(left, last[alloc])
		}
	}
	return left, made
}

func group(l line) host.AllocGroup {
	return host.AllocGroup{Alloc: host.AllocID(l.Alloc), Job: "user", Group: "g", Namespace: "default",
		Sealed: l.Sealed}
}

// pluginFile is the path of the record of the plugin's task. pidFile has the plugin's process ID.
func (n *node) pluginFile() string { return filepath.Join(n.Dir, "plugin.json") }
func (n *node) pidFile() string    { return filepath.Join(n.Dir, "plugin.pid") }

func (n *node) pluginPID() (pid int, err error) {
	text, err := os.ReadFile(n.pidFile())
	if err == nil {
		_, err = fmt.Sscan(string(text), &pid)
	}
	return pid, err
}

func alive(pid int) bool {
	stat, err := proc.ReadStat(pid)
	return err == nil && !stat.Exited()
}

// plugin returns the plugin's task as an earlier process has recorded it.
func (n *node) plugin() (task host.AllocTask, running bool, err error) {
	text, err := os.ReadFile(n.pluginFile())
	if errors.Is(err, os.ErrNotExist) {
		return task, false, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &task)
	}
	pid, pidErr := n.pluginPID()
	return task, pidErr == nil && alive(pid), err
}

// startPlugin starts the plugin's task. If the task has an attempt already, it starts the next one.
func (n *node) startPlugin(ctx context.Context, task host.AllocTask) (host.AllocTask, error) {
	if task.Attempt > 0 {
		if err := n.host.TaskExited(ctx, task.Key(), task.Attempt, 0, 9, false); err != nil {
			return task, err
		}
	} else {
		text := "task \"plugin\" {\n driver = \"raw_exec\"\n csi_plugin {\n id = \"fake\"\n type = \"monolith\"\n" +
			" heartbeat {\n interval = \"1s\"\n timeout = \"30s\"\n }\n }\n}\n"
		job, _, err := n.host.Parse(ctx, host.Source{Name: "plugin.hcl", Text: []byte(text)}, host.ParseOptions{})
		if err != nil {
			return task, err
		}
		task = host.AllocTask{Alloc: host.AllocID("plugin-" + n.Name), Task: "plugin",
			Sealed: job.Groups[0].Tasks[0].Sealed}
	}
	task.Attempt++
	plan, err := n.host.TaskStarting(ctx, task)
	if err != nil {
		return task, err
	}
	text, err := json.Marshal(task)
	if err == nil {
		err = os.WriteFile(n.pluginFile(), text, 0o600)
	}
	if err != nil {
		return task, err
	}
	cmd := exec.Command(n.CSIFake, "--caps", "CREATE_DELETE_VOLUME,PUBLISH_UNPUBLISH_VOLUME,STAGE_UNSTAGE_VOLUME,"+
		"node/SINGLE_NODE_MULTI_WRITER,controller/SINGLE_NODE_MULTI_WRITER", "--node-id", n.Name+"-id",
		"--instance", n.Name, "--mounts", "--data", n.Data, "--journal", n.Journal, "--state", n.Backend)
	cmd.Env = plan.Environ(os.Environ())
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return task, err
	}
	go func() { _ = cmd.Wait() }()
	if err := os.WriteFile(n.pidFile(), fmt.Append(nil, cmd.Process.Pid), 0o600); err != nil {
		return task, err
	}
	return task, n.host.TaskStarted(ctx, task.Key(), task.Attempt)
}

// swap replaces the shim every second. A swap may be refused if the driver is frozen and does not answer the next shim.
func (n *node) swap(ctx context.Context) {
	for i := 1; ctx.Err() == nil; i++ {
		next := time.After(time.Second)
		_, err := n.host.Swap(ctx, host.Binary{Path: n.Shims[i%len(n.Shims)]})
		switch {
		case err == nil:
			n.note(line{Kind: swapped})
		case ctx.Err() == nil && !strings.Contains(err.Error(), "no plugin answers this shim"):
			n.note(line{Kind: broken, Error: "swap: " + err.Error()})
		}
		select {
		case <-next:
		case <-ctx.Done():
		}
	}
}

// verify returns an error that names everything that is left on this node after all allocs were released.
func (n *node) verify(ctx context.Context) error {
	var errs []error
	claims, _, err := n.host.Claims(ctx, host.ClaimQuery{})
	errs = append(errs, err)
	for _, c := range claims {
		if string(c.Node) == n.Name {
			errs = append(errs, fmt.Errorf("alloc %s still claims %s", c.Alloc, c.Name))
		}
	}
	allocs, _, err := n.host.Allocs(ctx, host.AllocQuery{})
	errs = append(errs, err)
	for _, a := range allocs {
		errs = append(errs, fmt.Errorf("alloc %s is %s", a.ID, a.State))
	}
	found, err := n.host.Doctor(ctx, false, "")
	errs = append(errs, err)
	for _, f := range found.Findings {
		errs = append(errs, fmt.Errorf("doctor: %+v", f))
	}
	return errors.Join(errs...)
}

// persist repeats a call until it succeeds.
func (n *node) persist(ctx context.Context, what string, call func(context.Context) error) {
	for ctx.Err() == nil {
		limited, cancel := context.WithTimeout(ctx, callLimit)
		err := call(limited)
		cancel()
		if err == nil {
			return
		}
		fmt.Fprintf(os.Stderr, "%s: %v\n", what, err)
		if unexplained(err) {
			n.note(line{Kind: broken, Error: what + ": " + err.Error()})
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// unexplained reports whether an error has another cause than a fault of the harness or another user of a volume.
func unexplained(err error) bool {
	if strings.Contains(err.Error(), "not active any more") { // comes from a replaced shim
		return true
	}
	return !errors.Is(err, host.ErrUnavailable) && !errors.Is(err, host.ErrUncertain) &&
		!errors.Is(err, host.ErrConflict) &&
		!errors.Is(err, context.DeadlineExceeded)
}
