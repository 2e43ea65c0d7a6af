package host

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
)

// choice is which binary is run: the one that the configuration names, or one that was swapped to since. The newest decision counts, so a
// swap outlives its host, until the configuration names another binary than before. It is a file of the state directory, written when the
// decision is: a host that is killed leaves the one before it, or the next.
type choice struct {
	path string
	pen  pen

	Configured string   `json:"configured"`         // SHA-256 of the binary that the configuration named when this was written
	Running    string   `json:"running"`            // of the one that is run
	Previous   string   `json:"previous,omitempty"` // of the one before, while the running one bakes
	Ran        []string `json:"ran,omitempty"`      // those that were active, the last first, without those that were rolled back
}

// ranKept is how many binaries are kept of those that ran.
const ranKept = 3

// openChoice reads the file. What cannot be read decides nothing.
func openChoice(dir string) *choice {
	c := &choice{path: filepath.Join(dir, "shim.json")}
	text, err := os.ReadFile(c.path)
	if err != nil || json.Unmarshal(text, c) != nil {
		return &choice{path: c.path}
	}
	return c
}

// kept are the binaries that may be wanted again. One that never was active is none of them, and pushes none of them out.
func (c *choice) kept() []string { return append([]string{c.Running, c.Previous}, c.Ran...) }

// ran notes that a binary is active. The one that it stood by for has then been rolled back.
func (c *choice) ran(sum string) {
	failed := sum
	if sum == c.Previous {
		failed = c.Running
	}
	others := slices.DeleteFunc(c.Ran, func(o string) bool { return o == sum || o == failed })
	c.Ran = slices.Insert(others, 0, sum)
	c.Ran = c.Ran[:min(len(c.Ran), ranKept)]
}

// write makes it durable.
func (c *choice) write() error {
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return c.pen.write(func() error { return writeDurably(c.path, text) })
}

func writeDurably(path string, text []byte) error {
	temp := path + ".new"
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	if err := os.Rename(temp, path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// decide is the binary to run where the configuration names the given one, and the one to fall back on; empty: none.
func (h *Host) decide(ctx context.Context, configured digest) (run, fallback digest) {
	c := h.choice
	swapped := c.Configured == configured.SHA256 && c.Running != c.Configured && c.Running != ""
	previous := c.Previous
	if c.Configured, c.Previous = configured.SHA256, ""; !swapped {
		c.Running = configured.SHA256
		return configured, digest{}
	}
	run, err := h.binaries.Stored(ctx, c.Running)
	if err != nil {
		h.config.Logger.Warn("the shim that was swapped to last cannot be used; the configured one is started", "error", err)
		c.Running = configured.SHA256
		return configured, digest{}
	}
	h.config.Logger.Info("the shim that was swapped to last is started; the configured one has not changed since", "sha256", run.SHA256)
	if previous != "" {
		fallback, _ = h.binaries.Stored(ctx, previous)
	}
	return run, fallback
}

// chosen is choose for a binary that is active, or was.
func (h *Host) chosen(run, previous digest) {
	h.choice.ran(run.SHA256)
	h.choose(run, previous)
}

// choose makes it so that the binary is run, also by the next host, while previous stands by. It is called by one goroutine at a time.
func (h *Host) choose(run, previous digest) {
	h.running.set(run)
	h.choice.Running, h.choice.Previous = run.SHA256, previous.SHA256
	h.binaries.Keep(h.choice.kept()...)
	if err := h.choice.write(); err != nil {
		h.config.Logger.Warn("which shim is run could not be written down: the next host may start the one before", "error", err)
	}
}
