package csifake

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"holdfast/internal/csifake/journal"
)

// Role says which services a plugin serves besides Identity.
type Role string

const (
	Node       Role = "node"
	Controller Role = "controller"
	Monolith   Role = "monolith" // both
)

// Empty stands for an empty value in fields where "" means the default.
const Empty = "\x00empty"

// Config describes a plugin. Its zero value is a monolith without any optional capability, on a socket in a new
// temporary directory.
type Config struct {
	Name       string   // of the provider; default csifake.example.org
	Version    string   // default 1.0.0
	Instance   string   // name of the writer in the journal; default <role>@<node id>
	Role       Role     // default Monolith
	NodeID     string   // default node-1
	Caps       []string // "STAGE_UNSTAGE", "node/EXPAND_VOLUME", "controller/99"; see parseCaps
	Mutable    []string // keys of mutable_parameters that it knows; none: any key
	Spec       string   // CSI version on which the plugin is built, "1.0" to "1.14"; Caps of other versions are dropped
	MaxVolumes int64    // per node; 0: not reported, no limit
	Topology   map[string]string
	Capacity   int64 // of the backend in bytes; default 1 TiB

	Socket     string                      // default csi.sock in a new directory
	Listener   net.Listener                // instead of a socket
	Intercept  grpc.UnaryServerInterceptor // around each unary call
	Endpoint   string                      // CSI_ENDPOINT as it was given, for the journal
	Journal    string                      // file; default journal.jsonl beside the socket
	Memory     *journal.Memory             // instead of a file; the default with a Listener
	Script     []Rule                      // rules at the start
	ScriptFile string                      // JSON list of rules, read again for every call

	Backend   *Backend // storage system; default a new one in memory. Plugins may share one
	IDs       IDForm   // of the volumes that CreateVolume makes; default IDShort
	Page      int      // largest page of ListVolumes and ListSnapshots, in reverse order; 0: no limit
	Volumes   []string // IDs of volumes that exist from the start
	AnyVolume bool     // every id exists. Default if there are no Volumes and CREATE_DELETE_VOLUME is not among Caps
	Forgetful bool     // its next start after a kill finds the Backend empty; mounts stay. See Backend.start

	VolumeContext  map[string]string // added to the answers of CreateVolume
	PublishContext map[string]string // added to the answers of ControllerPublishVolume

	Mounts  bool      // make real mounts at stage and publish
	Mount   MountKind // with Mounts: default MountBind if there is a DataDir, else MountTmpfs
	Block   BlockKind // with Mounts: kind of block volumes; default BlockLoop if possible, else BlockNode
	DataDir string    // with Mounts: where volumes keep their data
	Blind   bool      // do not access any path: for tests with invented paths

	Die func()       // action of a crash; default: end this plugin as a kill would, within the process
	Log hclog.Logger // default none
}

// filled returns the configuration with its defaults, and the capabilities as sets.
func (c Config) filled() (Config, capSets, error) {
	caps, err := parseCaps(c.Caps...)
	if err != nil {
		return c, caps, err
	}
	built, err := parseVersion(c.Spec)
	if err != nil {
		return c, caps, err
	}
	built.limit(caps)
	c.Name, c.Version = orDefault(c.Name, "csifake.example.org"), orDefault(c.Version, "1.0.0")
	c.NodeID = orDefault(c.NodeID, "node-1")
	if c.Role == "" {
		c.Role = Monolith
	}
	if err := c.check(); err != nil {
		return c, caps, err
	}
	if c.Instance == "" {
		c.Instance = string(c.Role) + "@" + c.NodeID
	}
	if c.Capacity == 0 {
		c.Capacity = 1 << 40
	}
	if c.Backend == nil {
		c.Backend = NewBackend("")
	}
	if len(c.Volumes) == 0 && !caps.has("controller/CREATE_DELETE_VOLUME") {
		c.AnyVolume = true
	}
	if c.Log == nil {
		c.Log = hclog.NewNullLogger()
	}
	return c.placed(caps)
}

// check returns an error if the configuration has an unknown word, or bind mounts without a directory for them.
func (c Config) check() error {
	switch {
	case !slices.Contains([]Role{Node, Controller, Monolith}, c.Role):
		return fmt.Errorf("csifake: unknown role %q", c.Role)
	case !slices.Contains([]MountKind{"", MountTmpfs, MountBind, MountFuse}, c.Mount):
		return fmt.Errorf("csifake: unknown kind of mounts %q", c.Mount)
	case !slices.Contains(IDForms, c.IDs):
		return fmt.Errorf("csifake: unknown form of ids %q", c.IDs)
	case c.Mount == MountBind && c.DataDir == "":
		return errors.New("csifake: bind mounts need a data directory")
	case !slices.Contains([]BlockKind{"", BlockLoop, BlockNode, BlockFile}, c.Block):
		return fmt.Errorf("csifake: unknown kind of block volumes %q", c.Block)
	}
	return nil
}

// placed sets the socket and the journal.
func (c Config) placed(caps capSets) (Config, capSets, error) {
	if c.Listener != nil {
		c.Socket = ""
		if c.Journal == "" && c.Memory == nil {
			c.Memory = &journal.Memory{}
		}
		return c, caps, nil
	}
	if c.Socket == "" {
		dir, err := os.MkdirTemp("", "h-")
		if err != nil {
			return c, caps, err
		}
		c.Socket = filepath.Join(dir, "csi.sock")
	}
	if c.Journal == "" && c.Memory == nil {
		c.Journal = filepath.Join(filepath.Dir(c.Socket), "journal.jsonl")
	}
	return c, caps, nil
}

// orDefault returns fallback for "", and "" for Empty.
func orDefault(s, fallback string) string {
	switch s {
	case "":
		return fallback
	case Empty:
		return ""
	}
	return s
}

func (c Config) openJournal() (*journal.Writer, error) {
	if c.Memory != nil {
		return c.Memory.Open(c.Name, c.Instance), nil
	}
	return journal.Open(c.Journal, c.Name, c.Instance)
}

// process returns a name that all processes of the plugin on one node have in common.
func (c Config) process() string { return string(c.Role) + "@" + c.NodeID }

func (c Config) serves(r Role) bool { return c.Role == Monolith || c.Role == r }

// SocketPath turns a CSI_ENDPOINT into a path: unix:///run/csi.sock, unix:/run/csi.sock or /run/csi.sock.
func SocketPath(endpoint string) string {
	return strings.TrimPrefix(strings.TrimPrefix(endpoint, "unix://"), "unix:")
}
