package csi

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
	"holdfast/internal/durable"
	"holdfast/registry"
)

// Suspensions are optional calls that are not made any more, because a plugin died during such a call. One death
// suffices, because a second one may break mounts in use. A needless suspension only costs one answer, and doctor
// reports it with the way to end it.
//
// Each suspension is a file that outlives the shim, and the tasks and jobs of the plugin. A person ends the suspension
// by removing the file. A nil *Suspensions suspends nothing.
type Suspensions struct {
	dir string

	mu        sync.Mutex            // held while a suspension is read or written
	unwritten map[string]suspension // suspensions whose file could not be written, by path
}

// suspension is one suspended call. It holds while the plugin reports the same provider and version.
type suspension struct {
	Plugin   registry.PluginID `json:"plugin"`
	RPC      registry.RPC      `json:"rpc"`
	Provider string            `json:"provider"`
	Version  string            `json:"version"`
	Detail   string            `json:"detail"` // for people
	Since    time.Time         `json:"since"`
}

func (s suspension) holds(in registry.Instance) bool {
	return s.Plugin == in.Plugin && s.Provider == in.Fingerprint.Provider && s.Version == in.Fingerprint.Version
}

// NewSuspensions returns the suspensions in dir, which need not exist.
func NewSuspensions(dir string) *Suspensions {
	return &Suspensions{dir: dir, unwritten: map[string]suspension{}}
}

func (s *Suspensions) path(rpc registry.RPC, id registry.PluginID) string {
	return filepath.Join(s.dir, url.PathEscape(string(id))+"."+string(rpc)+".json")
}

// Reason returns why the call is not made, and what a person can do. Both are empty if the call may be made.
func (s *Suspensions) Reason(rpc registry.RPC, in registry.Instance) (why, advice string) {
	if s == nil {
		return "", ""
	}
	path := s.path(rpc, in.Plugin)
	s.mu.Lock()
	defer s.mu.Unlock()
	one, written, err := s.load(path)
	switch {
	case err != nil:
		why = fmt.Sprintf("cannot read whether the plugin died during %s: %v", rpc, err)
		return why, "to allow the call: " + display.Command("rm", path)
	case !one.holds(in):
		return "", ""
	}
	why = fmt.Sprintf("it died during %s at %s, and is not asked again in version %q",
		rpc, one.Since.UTC().Format(time.RFC3339), one.Version)
	advice = "update the plugin, or allow the call: " + display.Command("rm", path)
	if !written {
		advice = "update the plugin, or allow the call: restart the agent (cannot write to " + path + ")"
	}
	if rpc == registry.ListVolumesRPC {
		advice += "; if it must never be asked, set list_volumes = false in its csi_plugin stanza"
	}
	return why, advice
}

// load returns the suspension of the call, or the zero value. written reports whether it is in a file. The caller holds
// the lock.
func (s *Suspensions) load(path string) (one suspension, written bool, err error) {
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return s.unwritten[path], false, nil
	case err != nil:
		return s.unwritten[path], false, err
	}
	err = json.Unmarshal(text, &one)
	return one, true, err
}

// SuspendFailed suspends the call that ended with the error failed, and commits an event. It does nothing if the
// plugin's connection was not lost during the call, if ctx has ended, or if the plugin's task is being stopped. If the
// suspension cannot be written, SuspendFailed keeps it in memory and returns an error.
func (s *Suspensions) SuspendFailed(
	ctx context.Context, state registry.State, in registry.Instance, failed error, now time.Time,
) error {
	call, is := errors.AsType[*registry.CallError](failed)
	if s == nil || !is || !call.Lost || ctx.Err() != nil {
		return nil
	}
	stopping := false
	err := state.View(ctx, func(v registry.View) error {
		task, found := v.Task(in.TaskKey())
		stopping = found && task.Phase == registry.TaskStopping
		return nil
	})
	if err != nil || stopping {
		return err
	}
	one := suspension{in.Plugin, call.RPC, in.Fingerprint.Provider, in.Fingerprint.Version, call.Detail, now}
	added, err := s.add(one, in)
	if !added {
		return nil
	}
	_, unreported := state.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Events: []registry.Event{{
			Kind: registry.EventReconciled, Role: in.Role, Plugin: in.Plugin, Alloc: in.Alloc, Task: in.Task, At: now,
			Detail: fmt.Sprintf("plugin %s died during %s, and is not asked again in version %q",
				in.Plugin, call.RPC, one.Version),
		}}}, nil
	})
	return errors.Join(err, unreported)
}

// add records the suspension. It does nothing if the call is suspended already, because one death can end several such
// calls. If the file cannot be written, add keeps the suspension in memory.
func (s *Suspensions) add(one suspension, in registry.Instance) (added bool, err error) {
	path := s.path(one.RPC, one.Plugin)
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, _, err := s.load(path); err == nil && old.holds(in) {
		return false, nil
	}
	delete(s.unwritten, path)
	text, err := json.Marshal(one)
	if err == nil {
		err = os.MkdirAll(s.dir, 0o700)
	}
	if err == nil {
		err = durable.WriteFile(path, text)
	}
	if err != nil {
		s.unwritten[path] = one
	}
	return true, err
}
