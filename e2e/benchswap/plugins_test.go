package benchswap

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
)

// pluginSpec is one plugin that the other process is to serve.
type pluginSpec struct {
	Name    string   // also of its journal
	Socket  string   //
	Dir     string   // for journals and the data of volumes
	Slow    []string // ids of volumes whose first stage and unstage of each use take SlowFor
	SlowFor time.Duration
}

var caps = []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE"}

// plugins is the process that serves them. It is one for all, so that they cost one runtime.
type plugins struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func startPlugins() (*plugins, error) {
	cmd := other("plugins")
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &plugins{cmd: cmd, in: in, out: bufio.NewScanner(out)}, cmd.Start()
}

// add returns when the plugin answers.
func (p *plugins) add(s pluginSpec) error {
	if err := json.NewEncoder(p.in).Encode(s); err != nil {
		return err
	}
	if !p.out.Scan() || p.out.Text() != s.Name {
		return fmt.Errorf("the process of the plugins answers %q for %s", p.out.Text(), s.Name)
	}
	return nil
}

func (p *plugins) stop() error {
	if err := p.in.Close(); err != nil {
		return err
	}
	return p.cmd.Wait()
}

// servePlugins serves what it is told on its input, until that ends.
func servePlugins() error {
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel()
	in := json.NewDecoder(os.Stdin)
	for {
		var s pluginSpec
		if err := in.Decode(&s); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		p, err := csifake.New(csifake.Config{
			Name: s.Name + ".example.org", Instance: s.Name, Caps: caps, Socket: s.Socket,
			Journal: journalOf(s.Dir, s.Name), Mounts: true,
			DataDir: filepath.Join(s.Dir, "data", s.Name),
		})
		if err != nil {
			return err
		}
		slow := &slowness{ids: map[string]bool{}, last: map[string]string{}, takes: s.SlowFor}
		for _, id := range s.Slow {
			slow.ids[id] = true
		}
		p.On("NodeStageVolume").Answer(slow.answer)
		p.On("NodeUnstageVolume").Answer(slow.answer)
		serving.Go(func() {
			if err := p.Run(ctx); err != nil {
				fmt.Fprintln(os.Stderr, s.Name, err)
			}
		})
		fmt.Println(s.Name)
	}
}

func journalOf(dir, name string) string { return filepath.Join(dir, name+".jsonl") }

// slowness makes the first stage and the first unstage of each use of some volumes slow. What is asked for again
// meanwhile is ABORTED by the plugin, as by real ones; what is asked for again after it is quick.
type slowness struct {
	ids   map[string]bool
	takes time.Duration
	mu    sync.Mutex
	last  map[string]string // volume -> the RPC that was slow last
}

func (s *slowness) answer(_ context.Context, req, reply proto.Message, err error) (proto.Message, error) {
	if m, is := req.(interface{ GetVolumeId() string }); is && s.ids[m.GetVolumeId()] && err == nil &&
		s.due(m.GetVolumeId(), req) {
		time.Sleep(s.takes)
	}
	return reply, err
}

func (s *slowness) due(id string, req proto.Message) bool {
	rpc := "unstage"
	if _, is := req.(*csi.NodeStageVolumeRequest); is {
		rpc = "stage"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	due := s.last[id] != rpc
	s.last[id] = rpc
	return due
}
