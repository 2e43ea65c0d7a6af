package disk

import (
	"encoding/json"
	"fmt"
	"maps"
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

// Usage is how a volume is staged; compared by value.
type Usage struct {
	Mode       Mode   `json:"mode"`
	FileSystem string `json:"file_system,omitempty"`
	Flags      string `json:"flags,omitempty"` // a digest: mount flags may hold secrets
}

// Record is all that is kept of a volume.
type Record struct {
	ID         ID                    `json:"id"`
	Name       Name                  `json:"name"`
	State      State                 `json:"state"`
	Backend    string                `json:"backend"`
	Bytes      int64                 `json:"bytes"`
	Usage      Usage                 `json:"usage"`                // what it was made for
	Parameters string                `json:"parameters,omitempty"` // a digest
	Attached   map[string]Attachment `json:"attached,omitempty"`   // by node id
	Staged     map[string]Stage      `json:"staged,omitempty"`     // by node id
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
	Mode     Mode `json:"mode"`
	ReadOnly bool `json:"read_only,omitempty"`
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
