package disk

import (
	"cmp"
	"encoding/json"
	"maps"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// State is the state of a volume. One that is not Ready does not exist for callers: it is being made or removed, or a
// kill interrupted that.
type State string

// The states.
const (
	Making   State = "making"
	Ready    State = "ready"
	Removing State = "removing"
)

// Mode is the widest use of a volume on its node.
type Mode string

// The modes, from narrow to wide.
const (
	Reader      Mode = "reader"       // published once, read-only
	Writer      Mode = "writer"       // published once
	MultiWriter Mode = "multi-writer" // published any number of times
)

// Includes reports whether a volume that was made or staged for m can be used as n.
func (m Mode) Includes(n Mode) bool { return n == m || n == Reader || m == MultiWriter }

// Access is the access type of a volume. A volume is made for one or for both, and staged with one.
type Access string

// The access types.
const (
	Mounted Access = ""       // a file system
	Raw     Access = "block"  // a block device
	Either  Access = "either" // the one or the other
)

// Usage is how a volume is staged. It is compared by value.
type Usage struct {
	Mode       Mode   `json:"mode"`
	Access     Access `json:"access,omitempty"`
	FileSystem string `json:"file_system,omitempty"` // ext4, xfs; "": none was requested
	Flags      string `json:"flags,omitempty"`       // a digest: mount flags may hold secrets
	Group      int    `json:"group,omitempty"`       // the group that the mounted volume is for; 0: none
}

// Fits reports whether a volume that was made or staged for u can be used as v.
func (u Usage) Fits(v Usage) bool {
	same := u.FileSystem == "" || v.FileSystem == "" || u.FileSystem == v.FileSystem
	return u.Mode.Includes(v.Mode) && (u.Access == v.Access || u.Access == Either) && same
}

func (u Usage) String() string {
	words := []string{"mode " + string(u.Mode), "access " + cmp.Or(string(u.Access), "mount")}
	if u.FileSystem != "" {
		words = append(words, "file system "+u.FileSystem)
	}
	return strings.Join(words, ", ")
}

// Record is the record of a volume or snapshot.
type Record struct {
	ID         ID                    `json:"id"`
	Name       Name                  `json:"name"`
	State      State                 `json:"state"`
	Backend    string                `json:"backend"`
	Bytes      int64                 `json:"bytes"`
	Usage      Usage                 `json:"usage"`                // what it was made for
	Parameters string                `json:"parameters,omitempty"` // a digest
	ReadAhead  int64                 `json:"read_ahead,omitempty"` // KiB, of its devices; 0: that of the kernel
	Source     ID                    `json:"source,omitempty"`     // what it was copied from
	Created    time.Time             `json:"created,omitzero"`     // of a snapshot or group
	Members    []ID                  `json:"members,omitempty"`    // of a group: its snapshots
	InGroup    ID                    `json:"in_group,omitempty"`   // of a snapshot: its group
	Formatted  bool                  `json:"formatted,omitempty"`  // it was staged with a file system
	Group      int                   `json:"group,omitempty"`      // whose the root directory was made last
	Frozen     bool                  `json:"frozen,omitempty"`     // it is being copied, or a kill ended that: Thaw it
	Attached   map[string]Attachment `json:"attached,omitempty"`   // by node id
	Staged     map[string]Stage      `json:"staged,omitempty"`     // by node id
}

// Attachment is the right of a node to stage a volume. The token proves it.
type Attachment struct {
	Token    string `json:"token"`
	Usage    Usage  `json:"usage"`
	ReadOnly bool   `json:"read_only,omitempty"`
}

// Stage is a requested staging mount. It is saved before the mount, and removed after the unmount.
type Stage struct {
	Path      string             `json:"path"`
	Usage     Usage              `json:"usage"`
	Boot      string             `json:"boot"`                // the boot of the machine in which it was mounted
	Published map[string]Publish `json:"published,omitempty"` // by target path
}

// Publish is a requested publish. It is saved before the mount, and removed after the unmount.
type Publish struct {
	Mode     Mode   `json:"mode"`
	ReadOnly bool   `json:"read_only,omitempty"`
	Device   string `json:"device,omitempty"` // of a raw volume: whose node is shown
}

// WrittenAt returns a target path where the volume can be written to, or an empty string.
func (r Record) WrittenAt(boot string) string {
	for _, st := range r.Staged {
		for target, p := range st.Published {
			if st.Boot == boot && !p.ReadOnly {
				return target
			}
		}
	}
	return ""
}

// ReadOnly reports whether the volume is staged read-only on the node.
func (r Record) ReadOnly(node string) bool {
	return r.Staged[node].Usage.Mode == Reader || r.Attached[node].ReadOnly
}

// WithStage returns the record with another stage on the node, or without one.
func (r Record) WithStage(node string, st *Stage) Record {
	r.Staged = with(r.Staged, node, st)
	return r
}

// writable reports whether the volume is staged as a file system and not read-only.
func (r Record) writable(boot string) bool {
	for node, st := range r.Staged {
		if st.Boot == boot && st.Usage.Access == Mounted && !r.ReadOnly(node) {
			return true
		}
	}
	return false
}

// WithAttachment returns the record with another attachment to the node, or without one.
func (r Record) WithAttachment(node string, a *Attachment) Record {
	r.Attached = with(r.Attached, node, a)
	return r
}

// WithPublish returns the stage with another publish at the target, or without one.
func (s Stage) WithPublish(target string, p *Publish) Stage {
	s.Published = with(s.Published, target, p)
	return s
}

func with[V any](m map[string]V, key string, value *V) map[string]V {
	next := maps.Clone(m)
	if next == nil {
		next = map[string]V{}
	}
	if value == nil {
		delete(next, key)
	} else {
		next[key] = *value
	}
	return next
}

// decode parses a record and checks its ID.
func decode(id ID, text []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(text, &r); err != nil {
		return Record{}, status.Errorf(codes.DataLoss, "record of volume %s: %v", id, err)
	}
	if r.ID != id || r.Bytes < 0 || r.State != Making && r.State != Ready && r.State != Removing {
		return Record{}, status.Errorf(codes.DataLoss, "record of volume %s is inconsistent", id)
	}
	return r, nil
}
