package registry

import (
	"context"
	"slices"
)

// State is durable state. The store implements it on disk, package registrytest in memory. Both pass one suite.
type State interface {
	// Commit calls the decisions one after the other and makes their changes durable. It uses one transaction or, in a
	// cluster, one for each decision. Concurrent commits may share a transaction. A decision sees the changes of the
	// decisions before it, and must not block. Without a cluster, Commit calls a decision at most once. In a
	// cluster, it calls a decision again if another node has changed what the decision has read.
	//
	// If a decision returns an error, or its change fails Check, the changes before it are committed, and Commit
	// returns the error unchanged. An empty change commits nothing. ErrExhausted (the disk is full) and ErrFenced (a
	// newer generation owns the state) mean that the last changes, or all, were not written. ErrUncertain means that
	// the outcome is unknown. When Commit returns nil, the changes are durable and their listeners have seen them. The
	// Seq is the index of the last change, or the current one if the last decision changed nothing.
	Commit(ctx context.Context, decisions ...Decision) (Seq, error)

	// View calls read with the last committed state. It waits for no commit.
	View(ctx context.Context, read func(View) error) error
}

// Decision returns the change to make of the state that it sees, or an error if there is none to make.
type Decision = func(View) (Change, error)

// Ensure commits the changes of the decisions. If all are empty, Ensure waits for no commit and returns the index that
// the decisions have seen. It may call each decision twice.
func Ensure(ctx context.Context, state State, decisions ...Decision) (at Seq, err error) {
	settled := false
	err = state.View(ctx, func(v View) error {
		at = v.Index()
		settled = !slices.ContainsFunc(decisions, func(decide Decision) bool {
			change, refused := decide(v)
			return refused != nil || !change.Empty()
		})
		return nil
	})
	if err != nil || settled {
		return at, err
	}
	return state.Commit(ctx, decisions...)
}

// Confirm calls read with the last committed state. In a cluster, another node may have committed what this node has
// not read yet. So if read fails, Confirm calls it again until it succeeds, or fails with the newest state.
func Confirm(ctx context.Context, state State, read func(View) error) error {
	_, err := Ensure(ctx, state, func(v View) (Change, error) { return Change{}, read(v) })
	return err
}

// EnsureAll commits the changes of a decision, one after the other, until a change is empty. A decision about many
// shared records writes at most Batch of them at a time. Each change has to be legal alone, as the process may end
// after it. A repetition of the operation continues with the records that are left.
func EnsureAll(ctx context.Context, state State, decide Decision) error {
	for {
		over := false
		_, err := Ensure(ctx, state, func(v View) (Change, error) {
			change, err := decide(v)
			over = change.Empty()
			return change, err
		})
		if err != nil || over {
			return err
		}
	}
}

// Change is what one transaction writes: records to put, keys of records to delete, and events. The State numbers the
// events and sets the CreateIndex and ModifyIndex of the records.
type Change struct {
	Put    []Record
	Delete []Key
	Events []Event
	// Texts has the JSON of records in Put that another node has written, so that fields unknown to this build are
	// stored too. A record without a text keeps the unknown fields that are stored already.
	Texts map[Key][]byte
}

// Empty reports whether the change writes nothing.
func (c Change) Empty() bool { return len(c.Put)+len(c.Delete)+len(c.Events) == 0 }

// Touches reports whether the change puts or deletes a record of one of the buckets.
func (c Change) Touches(buckets ...Bucket) bool {
	return slices.ContainsFunc(c.Keys(), func(k Key) bool { return slices.Contains(buckets, k.Bucket) })
}

// And returns the change with more added. The Texts of more are not added.
func (c Change) And(more Change) Change {
	return Change{
		append(c.Put, more.Put...), append(c.Delete, more.Delete...), append(c.Events, more.Events...), c.Texts,
	}
}

// split returns the part of the change that writes shared records, and the rest with the events.
func (c Change) split() (shared, node Change) {
	node.Events = c.Events
	for _, r := range c.Put {
		if r.Key().Bucket.Shared() {
			shared.Put = append(shared.Put, r)
		} else {
			node.Put = append(node.Put, r)
		}
	}
	for _, k := range c.Delete {
		if k.Bucket.Shared() {
			shared.Delete = append(shared.Delete, k)
		} else {
			node.Delete = append(node.Delete, k)
		}
	}
	return shared, node
}

// Parts returns the change in parts that Check accepts: first those of shared records, and last the rest with the
// events.
func (c Change) Parts() (parts []Change) {
	shared, rest := c.split()
	var single []Change // a change for each shared record
	for _, r := range shared.Put {
		single = append(single, Change{Put: []Record{r}})
	}
	for _, k := range shared.Delete {
		single = append(single, Change{Delete: []Key{k}})
	}
	for _, s := range single {
		if last := len(parts) - 1; last >= 0 {
			joined := parts[last].And(s)
			if n, _ := joined.sharedOperations(); n <= MaxShared {
				parts[last] = joined
				continue
			}
		}
		parts = append(parts, s)
	}
	if len(parts) == 0 || len(rest.Put)+len(rest.Delete) > 0 {
		return append(parts, rest)
	}
	parts[len(parts)-1].Events = rest.Events
	return parts
}

// WritesShared reports whether the change writes records that nodes share.
func (c Change) WritesShared() bool {
	return slices.ContainsFunc(c.Keys(), func(k Key) bool { return k.Bucket.Shared() })
}

// Mixed reports whether the change writes both records that nodes share and records of one node.
func (c Change) Mixed() bool {
	return c.WritesShared() && slices.ContainsFunc(c.Keys(), func(k Key) bool { return !k.Bucket.Shared() })
}

// Keys lists the keys of the records that the change puts, then of those that it deletes.
func (c Change) Keys() (keys []Key) {
	for _, r := range c.Put {
		keys = append(keys, r.Key())
	}
	return append(keys, c.Delete...)
}

// MaxEvents is the number of events that a State keeps. The transaction that writes new events prunes older ones.
const MaxEvents = 10_000

// Stamped returns the change as a State writes it at an index. It numbers the events, sets the indexes of the records,
// and gives each event its instance as the change puts it. created returns the CreateIndex of the stored record of a
// key, 0 if there is none.
func (c Change) Stamped(at Seq, generation Generation, created func(Key) Seq) Change {
	out := Change{Put: make([]Record, len(c.Put)), Delete: c.Delete, Events: make([]Event, len(c.Events))}
	instances := map[InstanceKey]Instance{}
	for i, r := range c.Put {
		out.Put[i] = Indexed(r, created(r.Key()), at)
		if instance, ok := out.Put[i].(Instance); ok {
			instances[instance.InstanceKey] = instance
		}
	}
	for i, e := range c.Events {
		e.Seq, e.Generation = at+Seq(i), generation
		if e.Instance != nil {
			if instance, put := instances[e.Instance.InstanceKey]; put {
				e.Instance = &instance
			}
		}
		out.Events[i] = e
	}
	return out
}

// Applied is one committed change, with the records as they were written. Listeners get it in commit order.
type Applied struct {
	Index  Seq // of the change; its events have the numbers Index, Index+1, ...
	Change Change
}

// Last returns the highest number of the change.
func (a Applied) Last() Seq { return a.Index + Seq(max(len(a.Change.Events), 1)) - 1 }
