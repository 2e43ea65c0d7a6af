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

	"holdfast/internal/csifake"
)

// pluginSpec is a plugin that the process of the plugins serves.
type pluginSpec struct {
	Name   string // also of its journal
	Socket string
	Dir    string // for journals and the data of volumes
}

var caps = []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE"}

// plugins is the one process that serves all plugins.
type plugins struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func startPlugins() (*plugins, error) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), servesPlugins+"=1")
	cmd.Stderr = os.Stderr
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

// add starts a plugin and returns once its socket exists.
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

// servePlugins serves the plugins that it reads from its input until that ends.
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
			Journal: journalPath(s.Dir, s.Name), Mounts: true,
			DataDir: filepath.Join(s.Dir, "data", s.Name),
		})
		if err != nil {
			return err
		}
		serving.Go(func() {
			if err := p.Run(ctx); err != nil {
				fmt.Fprintln(os.Stderr, s.Name, err)
			}
		})
		fmt.Println(s.Name)
	}
}

func journalPath(dir, name string) string { return filepath.Join(dir, name+".jsonl") }
