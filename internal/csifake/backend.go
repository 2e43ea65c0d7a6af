package csifake

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Backend is the storage system behind a plugin: its volumes and snapshots, and where they are attached, staged and
// published. Plugins of one process share it by pointer, plugins of several processes by its file. A plugin that was
// killed finds it again.
type Backend struct {
	mu   sync.Mutex
	path string
	now  contents

	reserving sync.Mutex
	reserved  map[string]*reservation // volumes that a call currently changes, at any plugin of this process
}

// reservation is the right of one call to change a volume. It ends with the call or with the plugin.
type reservation struct{ of *Plugin }

type contents struct {
	Volumes   map[string]*volume   `json:"volumes"`
	Snapshots map[string]*snapshot `json:"snapshots"`
	Groups    map[string][]string  `json:"groups"`
	NodeIDs   map[string]bool      `json:"node_ids,omitempty"`  // of plugins that serve Node
	Running   map[string]bool      `json:"running,omitempty"`   // forgetful plugins that run, by role and node
	Forgotten bool                 `json:"forgotten,omitempty"` // a plugin has forgotten its records
}

type volume struct {
	ID       string                 `json:"id"`
	Name     string                 `json:"name,omitempty"`
	Capacity int64                  `json:"capacity"`
	Used     *int64                 `json:"used,omitempty"` // in bytes; nil: a quarter of onNode.Size
	Context  map[string]string      `json:"context,omitempty"`
	Mutable  map[string]string      `json:"mutable,omitempty"` // parameters that can be modified
	Made     string                 `json:"made,omitempty"`    // hash of the CreateVolume request
	Attached map[string]*attachment `json:"attached,omitempty"`
	Nodes    map[string]*onNode     `json:"nodes,omitempty"`

	Writes int64           `json:"writes,omitempty"` // how often it was written to
	Blocks map[int64]int64 `json:"blocks,omitempty"` // number of the last write of each written block

	Topology  []map[string]string `json:"topology,omitempty"`  // the topology that the request preferred
	Ephemeral bool                `json:"ephemeral,omitempty"` // made by a publish, and deleted with the last unpublish
}

type attachment struct {
	Request string            `json:"request"` // hash
	Mode    int32             `json:"mode"`
	Context map[string]string `json:"context"`
}

// onNode has the state of a volume on one node.
type onNode struct {
	Staging   string            `json:"staging,omitempty"`
	Staged    string            `json:"staged,omitempty"`    // hash of the volume capability
	Published map[string]string `json:"published,omitempty"` // target path -> hash of capability and readonly
	Size      int64             `json:"size,omitempty"`      // as this node knows it; NodeExpandVolume updates it
	Block     bool              `json:"block,omitempty"`
	Device    string            `json:"device,omitempty"` // loop device of a block volume
}

type snapshot struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	Source string `json:"source"`
	Size   int64  `json:"size"`
	Made   int64  `json:"made"` // seconds since 1970
	Group  string `json:"group,omitempty"`

	Blocks map[int64]int64 `json:"blocks,omitempty"` // blocks of the volume at that time; nil: none was written
}

// NewBackend returns an empty backend, or the one in the file. With an empty path it is only in memory.
func NewBackend(path string) *Backend {
	return &Backend{path: path, now: newContents()}
}

func newContents() contents {
	return contents{Volumes: map[string]*volume{}, Snapshots: map[string]*snapshot{}, Groups: map[string][]string{}}
}

// change runs f on the contents and stores the result. f must make its changes last, after all checks that may fail. A
// backend with a file is locked against other processes meanwhile.
func (b *Backend) change(f func(*contents) error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.path == "" {
		return f(&b.now)
	}
	lock, err := os.OpenFile(b.path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("csifake: backend: %w", err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("csifake: lock backend: %w", err)
	}
	if err := b.load(); err != nil {
		return err
	}
	if err := f(&b.now); err != nil {
		return err
	}
	text, err := json.Marshal(b.now)
	if err != nil {
		return fmt.Errorf("csifake: backend: %w", err)
	}
	return replaceFile(b.path, text)
}

func (b *Backend) load() error {
	text, err := os.ReadFile(b.path)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("csifake: backend: %w", err)
	}
	b.now = newContents()
	if err := json.Unmarshal(text, &b.now); err != nil {
		return fmt.Errorf("csifake: backend %s: %w", b.path, err)
	}
	return nil
}

// reserve gives p the right to change a volume until release is called. free is false while another call has the right,
// unless the plugin of that call was killed.
func (b *Backend) reserve(id string, p *Plugin) (release func(), free bool) {
	b.reserving.Lock()
	defer b.reserving.Unlock()
	if other := b.reserved[id]; other != nil && !other.of.killed.Load() {
		return nil, false
	}
	if b.reserved == nil {
		b.reserved = map[string]*reservation{}
	}
	mine := &reservation{of: p}
	b.reserved[id] = mine
	return func() {
		b.reserving.Lock()
		defer b.reserving.Unlock()
		if b.reserved[id] == mine {
			delete(b.reserved, id)
		}
	}, true
}

// replaceFile writes a file atomically.
func replaceFile(path string, text []byte) error {
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// AddVolume adds a volume that was provisioned elsewhere.
func (b *Backend) AddVolume(id string, capacity int64, context map[string]string) error {
	return b.change(func(c *contents) error {
		if c.Volumes[id] == nil {
			c.Volumes[id] = &volume{ID: id, Capacity: capacity, Context: context}
		}
		return nil
	})
}

// SetUsed sets how many bytes of a volume are used. By default it is a quarter full.
func (b *Backend) SetUsed(id string, bytes int64) error {
	return b.volume(id, func(v *volume) { v.Used = &bytes })
}

// volume runs f on a volume. It fails if the volume does not exist.
func (b *Backend) volume(id string, f func(*volume)) error {
	return b.change(func(c *contents) error {
		if c.Volumes[id] == nil {
			return fmt.Errorf("csifake: backend: there is no volume %q", id)
		}
		f(c.Volumes[id])
		return nil
	})
}

// Parameters returns the mutable parameters of a volume. It returns nil if the volume has none or does not exist.
func (b *Backend) Parameters(id string) (all map[string]string) {
	_ = b.volume(id, func(v *volume) { all = maps.Clone(v.Mutable) })
	return all
}

func (b *Backend) size(id string) (n int64) {
	_ = b.volume(id, func(v *volume) { n = v.Capacity }) // a missing volume has size 0
	return n
}

func (b *Backend) device(id, node string) (device string, err error) {
	err = b.volume(id, func(v *volume) { device = v.on(node).Device })
	return device, err
}

func (b *Backend) setDevice(id, node, device string) error {
	return b.volume(id, func(v *volume) { v.on(node).Device = device })
}

// Reboot removes all mounts of a node from the records, as a restart of the node does.
func (b *Backend) Reboot(node string) error {
	return b.change(func(c *contents) error {
		for _, v := range c.Volumes {
			if on := v.Nodes[node]; on != nil {
				on.Staging, on.Staged, on.Published, on.Device = "", "", nil, ""
			}
		}
		return nil
	})
}

// start records that a forgetful plugin runs. If the process before it was killed, start deletes all records, as for a
// driver whose state file was empty when it died. forgot is then true. Mounts stay.
func (b *Backend) start(who string) (forgot bool, err error) {
	err = b.change(func(c *contents) error {
		if forgot = c.Running[who]; forgot {
			running := c.Running
			*c = newContents()
			c.Running, c.Forgotten = running, true
		}
		if c.Running == nil {
			c.Running = map[string]bool{}
		}
		c.Running[who] = true
		return nil
	})
	return forgot, err
}

// stop records that a forgetful plugin was stopped and not killed.
func (b *Backend) stop(who string) error {
	return b.change(func(c *contents) error { delete(c.Running, who); return nil })
}

// Usage says where one volume is in use.
type Usage struct {
	Attached  []string            // node ids
	Staged    map[string]string   // node id -> staging path
	Published map[string][]string // node id -> target paths
}

// Volumes returns the existing volumes, and where they are used.
func (b *Backend) Volumes() (map[string]Usage, error) {
	all := map[string]Usage{}
	err := b.change(func(c *contents) error {
		for id, v := range c.Volumes {
			u := Usage{Attached: slices.Sorted(maps.Keys(v.Attached)), Staged: map[string]string{},
				Published: map[string][]string{}}
			for node, n := range v.Nodes {
				if n.Staging != "" {
					u.Staged[node] = n.Staging
				}
				if len(n.Published) > 0 {
					u.Published[node] = slices.Sorted(maps.Keys(n.Published))
				}
			}
			all[id] = u
		}
		return nil
	})
	return all, err
}

func (v *volume) on(node string) *onNode {
	if v.Nodes == nil {
		v.Nodes = map[string]*onNode{}
	}
	if v.Nodes[node] == nil {
		v.Nodes[node] = &onNode{Published: map[string]string{}}
	}
	if v.Nodes[node].Published == nil {
		v.Nodes[node].Published = map[string]string{}
	}
	return v.Nodes[node]
}

func (v *volume) inUse() bool {
	if len(v.Attached) > 0 {
		return true
	}
	for _, n := range v.Nodes {
		if n.Staging != "" || len(n.Published) > 0 {
			return true
		}
	}
	return false
}
