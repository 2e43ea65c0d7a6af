package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/proto/bootstrap"
)

// version describes this program and the running shim.
type version struct {
	Version   string `json:"version"`
	Revision  string `json:"revision,omitempty"` // of the source; ends in -dirty if it was changed
	Go        string `json:"go"`
	Platform  string `json:"platform"`
	Protocols []int  `json:"protocols"` // versions of the protocol between host and shim that this program speaks

	Shim *control.Shim `json:"shim,omitempty"` // the shim of the running agent
}

func newVersion(p *program) *cobra.Command {
	return &cobra.Command{Use: "version", Short: "Print versions of the program, the running shim and the state file",
		RunE: func(c *cobra.Command, _ []string) error {
			v := version{Version: host.Version, Revision: revision(), Go: runtime.Version(),
				Platform: runtime.GOOS + "/" + runtime.GOARCH, Protocols: bootstrap.Versions()}
			ctx, cancel := context.WithTimeout(c.Context(), completionTimeout)
			defer cancel()
			if shim, err := p.client().Shim(ctx); err == nil && shim.Serving {
				v.Shim = &shim
			}
			if p.json {
				return writeJSON(p.out, v)
			}
			var about factList
			about.add("holdfast", v.Version, "Revision", v.Revision, "Go", v.Go+" "+v.Platform,
				"Protocols", v.Protocols)
			if s := v.Shim; s != nil {
				about.add("Running shim", fmt.Sprintf("%s, protocol %d, schema %d", s.Version, s.Protocol, s.Schema))
			}
			return columns(p.out, about)
		}}
}

// revision returns the commit from which this program was built, with -dirty if the source was changed. It is empty if
// the commit is not known. In Settings, vcs.revision comes before vcs.modified.
func revision() string {
	info, _ := debug.ReadBuildInfo()
	if info == nil {
		return ""
	}
	out := ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			out = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			out += "-dirty"
		}
	}
	return out
}

// newDocs returns a command that writes manual pages and shell completions for packages.
func newDocs() *cobra.Command {
	return &cobra.Command{Use: "docs DIR", Hidden: true,
		RunE: func(c *cobra.Command, args []string) error {
			root, man := c.Root(), filepath.Join(args[0], "man1")
			if err := os.MkdirAll(man, 0o755); err != nil {
				return err
			}
			root.DisableAutoGenTag = true
			for _, name := range []string{"state-dir", "address"} { // the environment has set them
				root.PersistentFlags().Lookup(name).DefValue = ""
			}
			header := &doc.GenManHeader{Section: "1", Source: "holdfast " + host.Version, Manual: "Holdfast"}
			return errors.Join(
				doc.GenManTree(root, header, man),
				root.GenBashCompletionFileV2(filepath.Join(args[0], "holdfast.bash"), true),
				root.GenZshCompletionFile(filepath.Join(args[0], "_holdfast")),
				root.GenFishCompletionFile(filepath.Join(args[0], "holdfast.fish"), true))
		}}
}
