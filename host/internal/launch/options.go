package launch

import (
	"os"
	"path/filepath"
	"strings"
	"time"

	hclog "github.com/hashicorp/go-hclog"

	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

const defaultStartTimeout = 10 * time.Second

// Options say how to start one shim process.
type Options struct {
	// Store holds the binary that Digest names. Both are required.
	Store  *Store
	Digest Digest
	// RunDir is where the private socket directory is created. Absolute; created (0700) if it does not exist. Required.
	RunDir string
	// Generation is the host's number for this process: for logs, errors and the name of its directory.
	Generation uint64
	// Args follow the program's name on the command line.
	Args []string
	// Env adds NAME=value pairs to the few variables that a shim gets. The working directory is /.
	Env []string
	// StartTimeout bounds everything from execution to the first answer. Zero is 10 s.
	StartTimeout time.Duration
	// Logger gets the shim's log. Nil drops it.
	Logger hclog.Logger
}

func (o *Options) complete() error {
	switch {
	case o.Store == nil:
		return registry.Invalid("start a shim: no store is given")
	case !filepath.IsAbs(o.RunDir):
		return registry.Invalid("start a shim: the run directory %q is not an absolute path", o.RunDir)
	}
	if o.StartTimeout <= 0 {
		o.StartTimeout = defaultStartTimeout
	}
	if o.Logger == nil {
		o.Logger = hclog.NewNullLogger()
	}
	o.RunDir = filepath.Clean(o.RunDir)
	return checkEnv(o.Env)
}

// checkEnv refuses variables of the protocol between host and shim.
func checkEnv(env []string) error {
	for _, pair := range env {
		name, _, ok := strings.Cut(pair, "=")
		if !ok || name == "" || strings.ContainsRune(pair, 0) {
			return registry.Invalid("start a shim: %q in its environment is not of the form NAME=value", pair)
		}
		if strings.HasPrefix(name, "PLUGIN_") || name == bootstrap.CookieKey || name == bootstrap.LifeFD {
			return registry.Invalid("start a shim: the environment variable %s is reserved", name)
		}
	}
	return nil
}

// inheritedNames are the only variables of the host's environment that a shim gets.
var inheritedNames = []string{"PATH", "TMPDIR", "LANG", "GOCOVERDIR"}

// environment returns the whole environment of the shim: the host's few, the caller's, then those of the protocol.
func (o *Options) environment(protocol []string) []string {
	env := []string{"GORACE=atexit_sleep_ms=0"} // else a shim built with -race takes a second to end
	for _, name := range inheritedNames {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	env = append(env, o.Env...)
	return append(env, protocol...)
}
