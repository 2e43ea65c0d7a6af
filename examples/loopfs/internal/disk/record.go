package disk

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"
)

// State is how far a volume's life has come.
type State string

// A volume in any other state than Ready does not exist for callers: a kill interrupted its making or its removal.
const (
	Making   State = "making"
	Ready    State = "ready"
	Removing State = "removing"
)

// Mode says who may use a volume on its one node.
type Mode string

// The modes, from narrow to wide.
const (
	Reader      Mode = "reader"       // published once, read-only
	Writer      Mode = "writer"       // published once
	MultiWriter Mode = "multi-writer" // published any number of times
)

// Includes says whether a volume that was made or staged for m may be used as n.
func (m Mode) Includes(n Mode) bool {
	rank := map[Mode]int{Reader: 1, Writer: 2, MultiWriter: 3}
	return rank[n] != 0 && rank[n] <= rank[m]
}

// Access says as what a volume is used.
type Access string

// The kinds of access. A volume is made for one or for both, and staged as one.
const (
	Mounted Access = ""       // a file system
	Raw     Access = "block"  // a block device
	Either  Access = "either" // the one or the other
)

// Includes says whether a volume that was made or staged for a may be used as b.
func (a Access) Includes(b Access) bool { return a == b || a == Either }

// Usage is how a volume is staged; compared by value.
type Usage struct {
	Mode       Mode   `json:"mode"`
	Access     Access `json:"access,omitempty"`
	FileSystem string `json:"file_system,omitempty"` // ext4, xfs; "": none was asked for
	Flags      string `json:"flags,omitempty"`       // a digest: mount flags may hold secrets
	Group      string `json:"group,omitempty"`       // the number of the group that the mounted volume is for
}

// Fits says whether what was made or staged for u serves v.
func (u Usage) Fits(v Usage) bool {
	same := u.FileSystem == "" || v.FileSystem == "" || u.FileSystem == v.FileSystem
	return u.Mode.Includes(v.Mode) && u.Access.Includes(v.Access) && same
}

func (u Usage) String() string {
	words := []string{"mode " + string(u.Mode), "access " + cmp.Or(string(u.Access), "mount")}
	if u.FileSystem != "" {
		words = append(words, "file system "+u.FileSystem)
	}
	return strings.Join(words, ", ")
}

// Record is all that is kept of a volume or a snapshot.
type Record struct {
	ID         ID        `json:"id"`
	Name       Name      `json:"name"`
	State      State     `json:"state"`
	Backend    string    `json:"backend"`
	Bytes      int64     `json:"bytes"`
	Usage      Usage     `json:"usage"`                // what it was made for
	Parameters string    `json:"parameters,omitempty"` // a digest
	Source     ID        `json:"source,omitempty"`     // what it was copied from
	Created    time.Time `json:"created,omitzero"`     // of a snapshot
	Group      string    `json:"group,omitempty"`      // whose the root directory was made last
	// a copy is being made, or a kill ended that: Thaw it
	Frozen   bool                  `json:"frozen,omitempty"`
	Attached map[string]Attachment `json:"attached,omitempty"` // by node id
	Staged   map[string]Stage      `json:"staged,omitempty"`   // by node id
}

// Attachment is a volume's right to be staged on a node. The node proves with the token that it was given to it.
type Attachment struct {
	Token    string `json:"token"`
	Usage    Usage  `json:"usage"`
	ReadOnly bool   `json:"read_only,omitempty"`
}

// Stage is the wish that a volume is mounted at a path on a node; written before the mount, removed after the unmount.
type Stage struct {
	Path      string             `json:"path"`
	Usage     Usage              `json:"usage"`
	Boot      string             `json:"boot"`                // the boot of the machine in which it was mounted
	Published map[string]Publish `json:"published,omitempty"` // by target path
}

// Publish is the wish that a staged volume is shown at a target path; written before, removed after, like Stage.
type Publish struct {
	Mode     Mode   `json:"mode"`
	ReadOnly bool   `json:"read_only,omitempty"`
	Device   string `json:"device,omitempty"` // of a raw volume: whose node is shown
}

// UsedBy says who stands in the way of the volume's removal, or "". A stage of an earlier boot is nobody.
func (r Record) UsedBy(boot string) string {
	for node, st := range r.Staged {
		if st.Boot == boot {
			return fmt.Sprintf("it is staged at %s on node %s", st.Path, node)
		}
	}
	for node := range r.Attached {
		return fmt.Sprintf("it is attached to node %s", node)
	}
	return ""
}

// Written says where somebody may write to the volume, or "". What was published in an earlier boot is gone.
func (r Record) Written(boot string) string {
	for _, st := range r.Staged {
		for target, p := range st.Published {
			if st.Boot == boot && !p.ReadOnly {
				return target
			}
		}
	}
	return ""
}

// ReadOnly says whether the volume is staged on the node so that nobody can write.
func (r Record) ReadOnly(node string) bool {
	return r.Staged[node].Usage.Mode == Reader || r.Attached[node].ReadOnly
}

// WithStage is the record with another stage on that node; nil takes it away.
func (r Record) WithStage(node string, st *Stage) Record {
	r.Staged = with(r.Staged, node, st)
	return r
}

// WithAttachment is the record with another attachment to that node; nil takes it away.
func (r Record) WithAttachment(node string, a *Attachment) Record {
	r.Attached = with(r.Attached, node, a)
	return r
}

// WithPublish is the stage with another publish at that target; nil takes it away.
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

// decode reads a record and refuses one that is not of that id.
func decode(id ID, text []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(text, &r); err != nil {
		return Record{}, Errorf(ErrDamaged, "record of volume %s: %w", id, err)
	}
	if r.ID != id || r.Bytes < 0 || r.State != Making && r.State != Ready && r.State != Removing {
		return Record{}, Errorf(ErrDamaged, "record of volume %s contradicts itself", id)
	}
	return r, nil
}
