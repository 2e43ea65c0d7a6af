package cluster

import (
	"iter"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/registry"
)

// reads is a Reader that notes which keys of etcd the reader's decision depends on.
type reads struct {
	registry.Reader
	keys
	keysRead map[string]bool // keys
	prefixes map[string]bool
}

func newReads(r registry.Reader, k keys) *reads {
	return &reads{r, k, map[string]bool{}, map[string]bool{}}
}

func (r *reads) Get(k registry.Key) registry.Record {
	if k.Bucket.Shared() {
		r.keysRead[r.record(k)] = true
	}
	return r.Reader.Get(k)
}

func (r *reads) Paths(b registry.Bucket, prefix string) iter.Seq[string] {
	if b.Shared() || sharedIndexes[b] {
		r.prefixes[r.record(registry.Key{Bucket: b, Path: prefix})] = true
	}
	return r.Reader.Paths(b, prefix)
}

// Aside implements View.Aside.
func (r *reads) Aside() registry.Reader { return r.Reader }

// any reports whether the decision depends on anything that nodes share.
func (r *reads) any() bool { return len(r.keysRead)+len(r.prefixes) > 0 }

// sharedIndexes are the indexes of shared records.
var sharedIndexes = func() map[registry.Bucket]bool {
	indexes := map[registry.Bucket]bool{}
	for _, t := range registry.RecordTypes {
		for _, x := range t.Indexes {
			indexes[x.Bucket] = indexes[x.Bucket] || t.Shared
		}
	}
	return indexes
}()

// unchanged returns the conditions that nothing of what was read, or is written by the change, has changed after a
// revision. A range without keys fulfils them.
func (r *reads) unchanged(c registry.Change, since int64) (conditions []clientv3.Cmp) {
	for _, record := range c.Put {
		r.keysRead[r.record(record.Key())] = true
	}
	for _, key := range c.Delete {
		r.keysRead[r.record(key)] = true
	}
	for prefix := range r.prefixes {
		conditions = append(conditions, clientv3.Compare(clientv3.ModRevision(prefix).WithPrefix(), "<", since+1))
	}
	for key := range r.keysRead {
		if !r.covered(key) {
			conditions = append(conditions, clientv3.Compare(clientv3.ModRevision(key), "<", since+1))
		}
	}
	return conditions
}

// covered reports whether a prefix that was read includes the key.
func (r *reads) covered(key string) bool {
	for prefix := range r.prefixes {
		if strings.HasPrefix(key, prefix) {
			return true
		}
	}
	return false
}
