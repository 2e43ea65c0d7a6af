package rules

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
)

// pkg is the description of a package of this module by go list.
type pkg struct {
	ImportPath string
	Dir        string
	Doc        string
	Name       string
	Imports    []string
	Deps       []string
	GoFiles    []string
}

const root = "../.."

var packages = sync.OnceValues(func() (map[string]pkg, error) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Doc,Name,Imports,Deps,GoFiles", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	list := map[string]pkg{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return list, nil
		} else if err != nil {
			return nil, err
		}
		list[p.ImportPath] = p
	}
})

func all(t *testing.T) map[string]pkg {
	t.Helper()
	list, err := packages()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	return list
}

// useCases are the packages of the shim that carry out calls.
var useCases = []string{"task", "node", "controller", "doctor"}

func shim(names ...string) (paths []string) {
	for _, n := range names {
		paths = append(paths, "holdfast/shim/internal/"+n)
	}
	return paths
}

// rule says what a package must not depend on, directly or through its dependencies, and why.
type rule struct {
	of     string   // the package; with a final "/..." all below it as well
	except []string // packages below it that have rules of their own
	direct bool     // only direct imports count
	no     []string // import paths, or prefixes that end in "..."
	only   []string // of this module only these; nil: any
	std    bool     // only the standard library and this module
	why    string
}

func rules() []rule {
	schema := []string{"holdfast/config...", "github.com/hashicorp/hcl...", "github.com/zclconf/go-cty...",
		"github.com/container-storage-interface..."}
	rs := []rule{
		{of: "holdfast/registry", only: []string{}, std: true,
			why: "registry has the types that all packages share, so it imports the standard library only"},
		{of: "holdfast/hooks", only: []string{"holdfast/registry"}, std: true,
			why: "hooks is pure: the host imports it too, so it brings no schema along"},
		{of: "holdfast/config", only: []string{"holdfast/registry", "holdfast/hooks"},
			why: "config parses text and knows nothing that runs"},
		{of: "holdfast/proto/wire", only: []string{"holdfast/registry", "holdfast/hooks", "holdfast/proto/holdfast/v1"},
			why: "host and shim both import wire, so it must not bring along either of them"},
		{of: "holdfast/host", no: []string{"github.com/prometheus..."},
			why: "the SDK has the numbers; an orchestrator exports them as it likes"},
		{of: "holdfast/shim", no: []string{"github.com/prometheus..."},
			why: "the host adds up and exports what a shim counts: no swap makes a counter smaller"},
		{of: "holdfast/host", no: append(schema, "holdfast/shim..."),
			why: "the host SDK holds no schema: everything about CSI changes by swapping the shim, without a host " +
				"rebuild"},
		{of: "holdfast/host/...", except: []string{"holdfast/host/cmd/holdfast", "holdfast/host/hosttest"},
			no:  append(schema, "holdfast/shim..."),
			why: "an orchestrator holds no schema either; host and shim meet in proto and hooks only"},
		{of: "holdfast/host", no: []string{"holdfast/internal/tracing/otlp", "go.opentelemetry.io/otel/sdk...",
			"go.opentelemetry.io/otel/exporters..."},
			why: "the SDK makes spans with the provider of its orchestrator, which exports them as it likes"},
		{of: "holdfast/host/cmd/holdfast", no: []string{"holdfast/config...", "holdfast/shim...",
			"github.com/container-storage-interface..."},
			why: "the command holds no schema of jobs; it reads HCL for its configuration file only"},
		{of: "holdfast/host/hosttest", no: []string{"holdfast/shim..."},
			why: "the shim in memory parses jobs as a shim does, and has nothing else of it"},
		{of: "holdfast/shim/...", no: []string{"holdfast/host..."}, why: "host and shim meet in proto and hooks only"},
		{of: "holdfast/shim", direct: true, only: []string{"holdfast/proto/bootstrap",
			"holdfast/internal/tracing/otlp", "holdfast/shim/internal/lifecycle"},
			why: "main is flags, then lifecycle"},
		{of: "holdfast/shim/internal/rpc", no: shim("store", "lifecycle"),
			why: "rpc passes calls to use cases; lifecycle connects these with the store"},
		{of: "holdfast/shim/internal/store", no: shim("rpc", "lifecycle"),
			why: "the store may import a use case whose interface it satisfies, and nothing above"},
		{of: "holdfast/shim/internal/csi", only: []string{"holdfast/registry", "holdfast/shim/internal/intent",
			"holdfast/internal/display", "holdfast/internal/durable", "holdfast/internal/tracing"},
			why: "csi speaks to plugins: use cases import its requests"},
		{of: "holdfast/shim/internal/intent", only: []string{"holdfast/registry", "holdfast/internal/tracing"},
			why: "an intent knows records only"},
		{of: "holdfast/internal/proc", only: []string{}, why: "proc only reads /proc"},
		{of: "holdfast/internal/mount", only: []string{"holdfast/internal/proc", "holdfast/registry", "holdfast/hooks"},
			why: "mount serves host, shim and plugins: it knows paths of the layout and kinds of errors, and none of " +
				"them"},
	}
	for _, u := range useCases {
		others := slices.DeleteFunc(slices.Clone(useCases), func(o string) bool { return o == u })
		rs = append(rs, rule{
			of: "holdfast/shim/internal/" + u, no: shim(append(others, "store", "rpc", "lifecycle")...),
			why: "a use case imports neither the store nor another use case: it declares the few methods that it " +
				"needs of them",
		})
	}
	return rs
}

func TestImportDirections(t *testing.T) {
	list := all(t)
	for _, r := range rules() {
		for path, p := range list {
			if !covers(r.of, path) || slices.Contains(r.except, path) {
				continue
			}
			deps := p.Deps
			if r.direct {
				deps = p.Imports
			}
			for _, dep := range deps {
				if broken := r.breaks(dep); broken != "" {
					t.Errorf("%s depends on %s: %s (%s)", path, dep, r.why, broken)
				}
			}
		}
	}
}

// A rule about a package that does not exist any more protects nothing.
func TestRulesAreAboutPackagesThatExist(t *testing.T) {
	list := all(t)
	for _, r := range rules() {
		found := false
		for path := range list {
			found = found || covers(r.of, path)
		}
		if !found {
			t.Errorf("there is a rule for %s, and no such package", r.of)
		}
	}
}

// The check must find violations.
func TestRulesCatch(t *testing.T) {
	for _, c := range []struct {
		of, dep string
		want    bool
	}{
		{"holdfast/host", "github.com/hashicorp/hcl/v2/hclsyntax", true},
		{"holdfast/host", "github.com/container-storage-interface/spec/lib/go/csi", true},
		{"holdfast/host", "holdfast/config", true},
		{"holdfast/host", "holdfast/hooks", false},
		{"holdfast/registry", "github.com/hashicorp/go-hclog", true},
		{"holdfast/registry", "encoding/json", false},
		{"holdfast/shim/internal/node", "holdfast/shim/internal/store", true},
		{"holdfast/shim/internal/node", "holdfast/shim/internal/intent", false},
		{"holdfast/shim/internal/node", "holdfast/shim/internal/csi", false},
		{"holdfast/shim/internal/csi", "holdfast/shim/internal/node", true},
	} {
		got := false
		for _, r := range rules() {
			got = got || covers(r.of, c.of) && r.breaks(c.dep) != ""
		}
		if got != c.want {
			t.Errorf("%s -> %s: broken = %v, want %v", c.of, c.dep, got, c.want)
		}
	}
}

func covers(of, path string) bool {
	if prefix, tree := strings.CutSuffix(of, "/..."); tree {
		return path == prefix || strings.HasPrefix(path, prefix+"/")
	}
	return path == of
}

func (r rule) breaks(dep string) string {
	for _, no := range r.no {
		if prefix, tree := strings.CutSuffix(no, "..."); dep == no || tree && strings.HasPrefix(dep, prefix) {
			return "it may not import " + no
		}
	}
	ours := strings.HasPrefix(dep, "holdfast/")
	if ours && r.only != nil && !slices.Contains(r.only, dep) {
		return "of this module it may import " + strings.Join(append([]string{"nothing"}, r.only...), ", ")
	}
	if r.std && !ours && strings.Contains(strings.SplitN(dep, "/", 2)[0], ".") {
		return "it may import the standard library only"
	}
	return ""
}

// Each running task has one process of holdfast-task.
func TestTaskParentIsSmall(t *testing.T) {
	var out []byte
	for _, args := range []string{"build -o /dev/null", "list -deps"} {
		cmd := exec.Command("go", append(strings.Fields(args), "-tags", "taskparent,netgo,osusergo",
			"./host/cmd/holdfast-task")...)
		cmd.Dir = root
		var err error
		if out, err = cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", args, err, out)
		}
	}
	for dep := range strings.FieldsSeq(string(out)) {
		for _, large := range []string{"net/http", "google.golang.org/...", "github.com/moby/moby/...",
			"github.com/spf13/...", "github.com/hashicorp/...", "go.opentelemetry.io/...", "go.etcd.io/...",
			"github.com/cilium/...", "runtime/cgo"} {
			if covers(large, dep) {
				t.Errorf("holdfast-task depends on %s: it would start slowly and stay large", dep)
			}
		}
	}
}

// No binary contains packages that are for tests.
func TestTestKitsStayInTests(t *testing.T) {
	kits := []string{
		"holdfast/registry/registrytest", "holdfast/shim/internal/store/storetest", "holdfast/internal/csifake",
		"holdfast/internal/mount/mounttest", "holdfast/internal/tracing/tracetest",
		"holdfast/host/hosttest", "holdfast/internal/installed", "holdfast/internal/enginetest",
		"holdfast/internal/etcdtest", "holdfast/internal/testbin", "holdfast/internal/fault",
		"holdfast/shim/internal/faulty",
	}
	for path, p := range all(t) {
		if slices.ContainsFunc(kits, func(k string) bool { return covers(k+"/...", path) }) {
			continue
		}
		for _, dep := range p.Imports {
			if slices.ContainsFunc(kits, func(k string) bool { return covers(k+"/...", dep) }) {
				t.Errorf("%s imports %s, which is for tests", path, dep)
			}
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	for path, p := range all(t) {
		if len(p.GoFiles) > 0 && len(p.Doc) < 20 && !strings.HasSuffix(path, "proto/holdfast/v1") &&
			!strings.Contains(path, "/testdata/") {
			t.Errorf("package %s has no comment that says what it is for", path)
		}
	}
}
