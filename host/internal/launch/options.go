package launch

import (
	"os"
	"strings"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	"go.opentelemetry.io/otel/trace"
)

// Options say how to start one shim process. All but Args and TracerProvider are required.
type Options struct {
	// Store holds the binary that Digest names.
	Store  *Store
	Digest Digest
	// RunDir is the absolute path of the directory in which the private socket directory is created.
	RunDir string
	// Generation is the host's number for this process: for logs, errors and the name of its directory.
	Generation uint64
	// Args follow the program's name on the command line. The working directory is /.
	Args []string
	// StartTimeout bounds everything from execution to the first answer.
	StartTimeout time.Duration
	// Logger gets the shim's log.
	Logger hclog.Logger
	// TracerProvider makes spans of calls to the shim that belong to a trace; nil: none.
	TracerProvider trace.TracerProvider
}

// inheritedNames are the only variables of the host's environment that a shim gets, beside those of OpenTelemetry.
var inheritedNames = []string{"PATH", "TMPDIR", "LANG", "GOCOVERDIR"}

// environment returns the whole environment of a shim: a few variables of the host, then those of the protocol.
func environment(protocol []string) []string {
	env := []string{"GORACE=atexit_sleep_ms=0"} // else a shim built with -race takes a second to end
	for _, name := range inheritedNames {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	for _, pair := range os.Environ() {
		if strings.HasPrefix(pair, "OTEL_") {
			env = append(env, pair)
		}
	}
	return append(env, protocol...)
}
