package main

import (
	"time"
)

// mode is the widest use of a volume on its node.
type mode string

// The modes, from narrow to wide.
const (
	readerMode      mode = "reader"       // published once, read-only
	writerMode      mode = "writer"       // published once
	multiWriterMode mode = "multi-writer" // published any number of times
)

// includes reports whether a volume that was made or staged for m can be used as n.
func (m mode) includes(n mode) bool { return n == m || n == readerMode || m == multiWriterMode }

// usage is how a volume is staged. It is compared by value.
type usage struct {
	Mode  mode   `json:"mode"`
	Block bool   `json:"block,omitempty"` // a block device; else a file system
	Flags string `json:"flags,omitempty"` // a digest: mount flags may hold secrets
	Group int    `json:"group,omitempty"` // the group that the mounted volume is for; 0: none
}

// fits reports whether a volume that was made or staged for u can be used as v.
func (u usage) fits(v usage) bool { return u.Mode.includes(v.Mode) && u.Block == v.Block }

func (u usage) String() string {
	if u.Block {
		return "mode " + string(u.Mode) + ", access block"
	}
	return "mode " + string(u.Mode) + ", access mount"
}

// record is the record of a volume, a snapshot or a group of snapshots. It says what was requested; the mount table
// says what is mounted.
type record struct {
	ID        volumeID   `json:"id"`
	Name      string     `json:"name,omitempty"`
	Backend   string     `json:"backend,omitempty"`
	Bytes     int64      `json:"bytes"`
	Usage     usage      `json:"usage,omitzero"`       // what it was made for
	ReadAhead int64      `json:"read_ahead,omitempty"` // KiB, of its devices; 0: that of the kernel
	Source    volumeID   `json:"source,omitempty"`     // what it was copied from
	Created   time.Time  `json:"created,omitzero"`     // of a snapshot or group
	Members   []volumeID `json:"members,omitempty"`    // of a group: its snapshots
	Group     int        `json:"group,omitempty"`      // whose the root directory was made last
	Stage     *stage     `json:"stage,omitempty"`
}

// stage is a requested stage. It is saved before the mount, and removed after the unmount.
type stage struct {
	Path  string `json:"path"`
	Usage usage  `json:"usage"`
	// Published has the target paths, and whether they are read-only. One is saved before its mount, and removed after
	// the unmount.
	Published map[string]bool `json:"published,omitempty"`
}

// stagedReadOnly reports whether the volume is staged for reading only.
func (r record) stagedReadOnly() bool { return r.Stage != nil && r.Stage.Usage.Mode == readerMode }
