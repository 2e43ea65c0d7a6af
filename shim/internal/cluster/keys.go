package cluster

import (
	"strings"

	"holdfast/registry"
)

// keys are the keys of one cluster in etcd, below its prefix "/holdfast/CLUSTER/":
//
//	r/BUCKET/PATH   a shared record as JSON, or an index entry with an empty object. A deleted key has an empty value
//	                for tombstoneTTL. The answer of a remote call stays for answerTTL, or until its caller has it
//	node/NAME       the member ID of the node, and the ID of its active shim
//	barrier/NAME    a commit of the node fails if it was decided before the last change of this key: see State.Settle
//	log             the logEntry of the last transaction
type keys struct{ prefix string }

func (k keys) records() string                 { return k.prefix + "r/" }
func (k keys) log() string                     { return k.prefix + "log" }
func (k keys) node(n registry.NodeName) string { return k.prefix + "node/" + string(n) }
func (k keys) barrier(n registry.NodeName) string {
	return k.prefix + "barrier/" + string(n)
}
func (k keys) record(key registry.Key) string {
	return k.records() + string(key.Bucket) + "/" + key.Path
}

// parse splits the etcd key of a record or index entry into bucket and path.
func (k keys) parse(key []byte) (registry.Key, bool) {
	rest, found := strings.CutPrefix(string(key), k.records())
	bucket, path, cut := strings.Cut(rest, "/")
	return registry.Key{Bucket: registry.Bucket(bucket), Path: path}, found && cut
}

// logEntry is written by each transaction, so that every node sees each transaction, even one that has only events.
type logEntry struct {
	Commit string           `json:"commit"` // a unique ID
	Events []registry.Event `json:"events,omitempty"`
}

// entryText is the value of an index entry.
const entryText = "{}"

// valuesOf returns the values that the change writes, by key, index entries included. The value of a deleted key is
// empty.
func valuesOf(view registry.View, c registry.Change) (map[registry.Key]string, error) {
	after := map[registry.Key]registry.Record{}
	for _, r := range c.Put {
		after[r.Key()] = r
	}
	for _, key := range c.Delete {
		after[key] = nil
	}
	values := map[registry.Key]string{}
	for key := range after {
		if old := view.Get(key); old != nil {
			values[key] = ""
			for _, entry := range registry.IndexKeys(old) {
				values[entry] = ""
			}
		}
	}
	for key, r := range after {
		if r == nil {
			continue
		}
		text, err := view.Text(registry.Indexed(r, 0, 0))
		if err != nil {
			return nil, registry.Errorf(registry.ErrInternal, "encode %s %q: %w", key.Bucket, key.Path, err)
		}
		values[key] = string(text)
		for _, entry := range registry.IndexKeys(r) {
			values[entry] = entryText
		}
	}
	return values, nil
}
