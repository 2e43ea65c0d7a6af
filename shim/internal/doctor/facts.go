package doctor

import (
	"time"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// Facts is the input of Examine.
type Facts struct {
	Layout  hooks.Layout
	Boot    string // boot ID
	Now     time.Time
	Live    bool // a shim runs meanwhile
	Records Records

	Mounts   mount.Mounts    // below the mount root, the oldest first
	Changing []string        // mount points that came or went meanwhile: they count as neither missing nor unknown
	Dirs     []mount.DirInfo // below the mount root, children first
	Sockets  mount.Mounts    // below the directories of sockets

	Inspected  map[string]mount.Info   // by target
	Users      map[string][]mount.User // of mounts that no record names, by mount point
	UsersError string                  // why the users are not known

	Listings   []Listing
	Damage     []string // how the state file contradicts itself
	Unexamined []Unexamined
}

// Unexamined is something that was not examined, and why.
type Unexamined struct {
	Plugin         registry.PluginID
	Detail, Advice string // for people
	Skipped        bool   // by configuration
}

// Listing is what a plugin's controller says about its volumes. A failed or truncated list makes no Listing.
type Listing struct {
	Plugin    registry.PluginID
	Node      registry.NodeID // this node as the plugin calls it; empty: not known
	Published bool            // the plugin says where its volumes are attached
	Volumes   map[registry.ExternalID]Listed
	// Before holds the records from before the plugin was asked. Records that have changed since are not compared with
	// its answer.
	Before  map[registry.VolumeKey]Version
	unknown int // number of volumes attached to this node that no record names
}

// Listed is one volume of a Listing.
type Listed struct {
	Here  bool                     // attached to this node
	Nodes map[registry.NodeID]bool // where it is attached, of the nodes that records name
}
