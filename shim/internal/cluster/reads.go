package cluster

import (
	"iter"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/registry"
)

// reads is a Reader that records which keys in etcd the caller's decision depends on.
type reads struct {
	registry.Reader
	keys
	keysRead map[string]bool // etcd keys
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

// any reports whether the decision depends on shared records.
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

// guard is a key of etcd, or all keys with a prefix, that a commit depends on.
type guard struct {
	key    string
	prefix bool
}

// guards are the conditions of a transaction: the key or prefix of each guard has not changed since the guard's
// revision. A prefix without keys fulfils its condition.
type guards map[guard]int64

// guards returns the condition that no key has changed since the revision. It covers the keys that were read and those
// that the change writes.
func (r *reads) guards(c registry.Change, since int64) guards {
	all := guards{}
	for prefix := range r.prefixes {
		all[guard{prefix, true}] = since
	}
	addKey := func(key string) {
		if !all.covers(key) {
			all[guard{key, false}] = since
		}
	}
	for key := range r.keysRead {
		addKey(key)
	}
	for _, record := range c.Put {
		addKey(r.record(record.Key()))
	}
	for _, key := range c.Delete {
		addKey(r.record(key))
	}
	return all.mergeByBucket(r.keys)
}

const (
	maxGuards = maxOperations - 3 // leaves room for the conditions of State.alive and for the barrier
	fewGuards = 5                 // more guards of one bucket may become one: see mergeByBucket
)

// mergeByBucket returns the guards if they fit into a transaction. If they do not, a bucket with more than fewGuards of
// them gets one guard for all its records instead.
func (g guards) mergeByBucket(k keys) guards {
	if len(g) <= maxGuards {
		return g
	}
	count := map[string]int{} // of the guards, by bucket
	merged := guards{}
	bucket := func(key string) string {
		rest := strings.TrimPrefix(key, k.records())
		return k.records() + rest[:strings.Index(rest, "/")+1]
	}
	for at := range g {
		count[bucket(at.key)]++
	}
	for at, since := range g {
		if of := bucket(at.key); count[of] > fewGuards {
			at = guard{of, true}
		}
		merged.add(at, since)
	}
	return merged
}

// covers reports whether the guards notice a change of the key.
func (g guards) covers(key string) bool {
	if _, found := g[guard{key, false}]; found {
		return true
	}
	for at := range g {
		if at.prefix && strings.HasPrefix(key, at.key) {
			return true
		}
	}
	return false
}

// add adds a guard. If the guard has two revisions, the earlier one counts.
func (g guards) add(at guard, since int64) {
	if was, found := g[at]; !found || since < was {
		g[at] = since
	}
}

func (g guards) conditions() (conditions []clientv3.Cmp) {
	for at, since := range g {
		condition := clientv3.Compare(clientv3.ModRevision(at.key), "<", since+1)
		if at.prefix {
			condition = condition.WithPrefix()
		}
		conditions = append(conditions, condition)
	}
	return conditions
}
