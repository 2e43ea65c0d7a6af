// Package suspend records the optional calls during which a plugin died, so that they are not made again.
//
// One death is enough: a second one may cost mounts in use, while a call that is suspended without need costs one
// answer, which doctor names together with the command that ends the suspension.
package suspend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"holdfast/internal/display"
	"holdfast/registry"
)

// Suspension records that a plugin died during a call. The call is not made while the plugin reports the same provider
// and version.
type Suspension struct {
	Plugin   registry.PluginID `json:"plugin"`
	RPC      registry.RPC      `json:"rpc"`
	Provider string            `json:"provider"`
	Version  string            `json:"version"`
	Detail   string            `json:"detail"` // for people
	Since    time.Time         `json:"since"`
}

// holds reports whether the suspension is for the plugin of in, in its version.
func (s Suspension) holds(in registry.Instance) bool {
	return s.Plugin == in.Plugin && s.Provider == in.Fingerprint.Provider && s.Version == in.Fingerprint.Version
}

// Calls are the suspended calls. Each is a file, so that a person can end a suspension by removing it. They outlive the
// shim, the tasks and the jobs of the plugin. A nil *Calls suspends nothing.
type Calls struct {
	dir string // empty: only in memory

	adding sync.Mutex // held while a suspension is recorded: of two calls that one death ended, one records it

	mu    sync.Mutex            // guards added
	added map[string]Suspension // those that could not be written
}

// New returns the calls that are suspended in dir, which need not exist. If dir is empty, they are kept in memory.
func New(dir string) *Calls { return &Calls{dir: dir, added: map[string]Suspension{}} }

func (c *Calls) path(rpc registry.RPC, id registry.PluginID) string {
	return filepath.Join(c.dir, url.PathEscape(string(id))+"."+string(rpc)+".json")
}

// Reason says why the call is not made, and what a person can do; empty: it may be made.
func (c *Calls) Reason(rpc registry.RPC, in registry.Instance) (why, advice string) {
	if c == nil {
		return "", ""
	}
	s, written, err := c.load(rpc, in.Plugin)
	path := c.path(rpc, in.Plugin)
	switch {
	case err != nil:
		why = fmt.Sprintf("the record of whether it survives %s cannot be read: %v", rpc, err)
		return why, "have it asked again: " + display.Command("rm", path)
	case !s.holds(in):
		return "", ""
	}
	why = fmt.Sprintf("it died during %s at %s, and is not asked again in version %q",
		rpc, s.Since.UTC().Format(time.RFC3339), s.Version)
	advice = "update the plugin, or have it asked again: " + display.Command("rm", path)
	if !written {
		advice = "update the plugin, or have it asked again: restart the agent (its death could not be written to " + path + ")"
	}
	if rpc == registry.ListVolumesRPC {
		advice += "; if it must never be asked, set list_volumes = false in its csi_plugin stanza"
	}
	return why, advice
}

// load returns the suspension of the call, or the zero value. written reports whether it is in a file.
func (c *Calls) load(rpc registry.RPC, id registry.PluginID) (s Suspension, written bool, err error) {
	path := c.path(rpc, id)
	c.mu.Lock()
	unwritten := c.added[path]
	c.mu.Unlock()
	if c.dir == "" {
		return unwritten, false, nil
	}
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return unwritten, false, nil
	case err != nil:
		return unwritten, false, err
	}
	err = json.Unmarshal(text, &s)
	return s, true, err
}

// Died suspends the call that ended with the error failed, and commits an event, if the plugin's connection was lost
// during the call and the plugin's task is not being stopped. A suspension that cannot be written is kept in memory,
// and is an error.
func (c *Calls) Died(ctx context.Context, log registry.State, in registry.Instance, failed error, now time.Time) error {
	call, is := errors.AsType[*registry.CallError](failed)
	if c == nil || !is || !call.Lost || ctx.Err() != nil {
		return nil
	}
	stopping := false
	err := log.View(ctx, func(v registry.View) error {
		task, found := v.Task(in.TaskKey())
		stopping = found && task.Phase == registry.TaskStopping
		return nil
	})
	if err != nil || stopping {
		return err
	}
	c.adding.Lock()
	defer c.adding.Unlock()
	if s, _, err := c.load(call.RPC, in.Plugin); err == nil && s.holds(in) {
		return nil // it was recorded for another call that this death ended
	}
	s := Suspension{in.Plugin, call.RPC, in.Fingerprint.Provider, in.Fingerprint.Version, call.Detail, now}
	err = c.add(s)
	_, untold := log.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Events: []registry.Event{{
			Kind: registry.EventReconciled, Role: in.Role, Plugin: in.Plugin, Alloc: in.Alloc, Task: in.Task, At: now,
			Detail: fmt.Sprintf("plugin %s died during %s, and is not asked again in version %q", in.Plugin, call.RPC, s.Version),
		}}}, nil
	})
	return errors.Join(err, untold)
}

func (c *Calls) add(s Suspension) error {
	path := c.path(s.RPC, s.Plugin)
	text, err := json.Marshal(s)
	if err == nil && c.dir != "" {
		err = replace(path, text)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.added, path)
	if err != nil || c.dir == "" {
		c.added[path] = s
	}
	return err
}

// replace writes a file that is never seen half written, and that is there after a crash.
func replace(path string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
