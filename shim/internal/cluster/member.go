package cluster

import (
	"cmp"
	"context"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/internal/display"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// CheckMember returns an error if a node with these records cannot be a member of the cluster with this ID. If the ID
// is empty, it returns an error if the node cannot run without a cluster. The reasons: a member without its cluster
// would use volumes that other nodes use, and the copy of a cluster's records would replace the records of a node
// outside it.
func CheckMember(v registry.View, id string) error {
	if copies := v.Copies(); len(copies) > 0 {
		switch c := copies[0]; {
		case id == "":
			return registry.Errorf(registry.ErrConflict,
				"this node is a member of cluster %q: configure it with the cluster block, or have it leave: "+
					"holdfast cluster leave", c.Cluster)
		case c.Cluster != id:
			return registry.Errorf(registry.ErrConflict,
				"this node is a member of cluster %q, and cannot join cluster %q", c.Cluster, id)
		}
		return nil
	}
	if id == "" {
		return nil
	}
	for key := range sharedKeys(v) {
		if key.Bucket == registry.BucketNodes { // a node that was drained has a record of itself
			continue
		}
		return registry.Errorf(registry.ErrConflict, "this node has volumes that cluster %q does not know; "+
			"start it without the cluster block, or stop the agent and move them: holdfast cluster migrate", id)
	}
	return nil
}

// join makes the node a member, and this shim the active one of its node. From then on no commit of an earlier shim
// succeeds. join waits while etcd cannot be read or written, and while another member has the name of this node. A new
// node also waits while it expects another number of nodes than the cluster. A node that was never let in has stored
// nothing, so it can start without the cluster again.
func (s *State) join(ctx context.Context) error {
	for {
		why, failed := s.tryJoin(ctx)
		if failed != nil || why == nil {
			return failed
		}
		s.notReady.Store(&why)
		if !intent.Sleep(ctx, time.Second) {
			return context.Cause(ctx)
		}
	}
}

// tryJoin tries once to join. why says why the node has to wait, and failed why its own store has failed. A new member
// ID is stored before the node is registered under it, and not while another member has the node's name.
func (s *State) tryJoin(ctx context.Context) (why, failed error) {
	if why = s.checkFormation(ctx); why != nil {
		return why, nil
	}
	member, failed := viewed(ctx, s.local, func(v registry.View) string { return s.copyIn(v).Member })
	if failed != nil {
		return nil, failed
	}
	if member == "" {
		member = uuid.NewString()
		if _, why = s.registered(ctx, member); why != nil {
			return why, nil
		}
		if _, failed = s.writeCopy(ctx, func(v registry.View) (registry.Change, error) {
			self := s.copyIn(v)
			self.Member = member
			return registry.Change{Put: []registry.Record{self}}, nil
		}); failed != nil {
			return nil, failed
		}
	}
	return s.register(ctx, member), nil
}

// checkFormation returns an error if the cluster expects another number of nodes than this node does. A registered node
// passes in any case: it may have claims, and other nodes may fence it if it does not get a lease. No node passes if
// etcd has lost the cluster.
func (s *State) checkFormation(ctx context.Context) error {
	formation, err := s.formation(ctx)
	why := formation.Check(s.expect)
	if err != nil || why == nil {
		return err
	}
	found, err := s.read(ctx, registry.NodeRecord(s.node))
	if node, is := found.(registry.Node); is && node.State != registry.NodeForgotten || err != nil {
		return err
	}
	return why
}

// formation reads the formation from etcd. It returns the error of checkLost if etcd has lost the cluster.
func (s *State) formation(ctx context.Context) (f registry.Formation, err error) {
	found, err := s.read(ctx, registry.Formation{Cluster: s.id}.Key())
	if err != nil {
		return f, err
	}
	lost, err := viewed(ctx, s.local, func(v registry.View) error { return s.checkLost(v, found) })
	f, _ = found.(registry.Formation)
	return f, cmp.Or(err, lost)
}

// checkLost returns an ErrConflict if etcd has lost the records of the cluster: found, the formation in etcd, is
// missing or differs from the one in the copy. The records in etcd would replace the copy, also the claims of mounted
// volumes.
func (s *State) checkLost(v registry.View, found registry.Record) error {
	known, is := v.Get(registry.Formation{Cluster: s.id}.Key()).(registry.Formation)
	f, exists := found.(registry.Formation)
	if !is || exists && (!known.Formed || f.Since.Equal(known.Since)) {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "etcd does not have the records of cluster %q that this node has: "+
		"restore a backup of etcd, or correct endpoints; if etcd has lost them for good, each node has to leave: "+
		"%s", s.id, display.Command("holdfast cluster leave --force --confirm", s.id))
}

// read reads a record of the cluster from etcd; nil: there is none.
func (s *State) read(ctx context.Context, key registry.Key) (registry.Record, error) {
	var found *clientv3.GetResponse
	err := s.request(ctx, func(ctx context.Context) (err error) {
		found, err = s.kv.Get(ctx, s.record(key))
		return err
	})
	if err != nil || len(found.Kvs) == 0 {
		return nil, err
	}
	return decode(key, found.Kvs[0])
}

// registered returns the node's key in etcd with its value; nil: there is none. It returns an ErrConflict if this
// member has another name, or if another member has the name of the node. A lost node's name is free.
func (s *State) registered(ctx context.Context, member string) (*mvccpb.KeyValue, error) {
	name, own, err := s.memberName(ctx, member)
	switch {
	case err != nil:
		return nil, err
	case name != "" && name != s.node:
		return nil, s.wrongName(name)
	case own == nil || name == s.node:
		return own, nil
	}
	other, err := s.read(ctx, registry.NodeRecord(s.node))
	if err != nil {
		return nil, err
	}
	if node, _ := other.(registry.Node); !node.Lost() {
		return nil, registry.Errorf(registry.ErrConflict, "another member of the cluster has the name %q; give this "+
			"node another name, or declare the other one out of service", s.node)
	}
	return own, nil
}

// memberName returns the name that etcd has for a member; empty: none. own is the key with the name of this node; nil:
// there is none.
func (s *State) memberName(
	ctx context.Context, member string,
) (name registry.NodeName, own *mvccpb.KeyValue, err error) {
	var all *clientv3.GetResponse
	if err := s.request(ctx, func(ctx context.Context) (err error) {
		all, err = s.kv.Get(ctx, s.keys.node(""), clientv3.WithPrefix())
		return err
	}); err != nil {
		return "", nil, err
	}
	for _, kv := range all.Kvs {
		at := registry.NodeName(strings.TrimPrefix(string(kv.Key), s.keys.node("")))
		if at == s.node {
			own = kv
		}
		if strings.HasPrefix(string(kv.Value), member+"/") && name != s.node {
			name = at
		}
	}
	return name, own, nil
}

// wrongName is the error of a member that etcd knows by another name. Under a new name it would not learn that its
// claims were released, because etcd records each release under the old name.
func (s *State) wrongName(name registry.NodeName) error {
	return registry.Errorf(registry.ErrConflict, "this node is called %q, but it is member %q of the cluster: set its "+
		"name to that, or have it leave before it joins with another name: %s", s.node, name,
		display.Command("holdfast cluster leave --node", string(name)))
}

// register writes the node's key in etcd. It returns an ErrConflict if another member has the name of the node. A write
// whose answer was lost may arrive late, so each write requires that the key has not changed since it was read.
func (s *State) register(ctx context.Context, member string) error {
	key, id := s.keys.node(s.node), member+"/"+uuid.NewString()
	for {
		was, err := s.registered(ctx, member)
		if err != nil {
			return err
		}
		if string(was.GetValue()) == id {
			s.own = was.GetModRevision()
			return nil
		}
		if err := s.request(ctx, func(ctx context.Context) error {
			_, err := s.kv.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", was.GetModRevision())).
				Then(clientv3.OpPut(key, id)).Commit()
			return err
		}); err != nil {
			return err
		}
	}
}
