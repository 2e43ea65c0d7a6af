package cluster

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/google/uuid"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/registry"
)

// CheckMember returns an error if a node with these records cannot be a member of the cluster with this ID, or of none if
// the ID is empty. A member without its cluster would use volumes that others use, and the copy of a cluster's records
// would replace the node's own.
func CheckMember(v registry.View, id string) error {
	if copies := v.Copies(); len(copies) > 0 {
		switch c := copies[0]; {
		case id == "":
			return registry.Errorf(registry.ErrConflict,
				"this node is a member of cluster %q: configure it with the cluster block, or have it leave: "+
					"holdfast cluster leave", c.Cluster)
		case c.Cluster != id:
			return registry.Errorf(registry.ErrConflict, "this node is a member of cluster %q, and cannot join cluster %q",
				c.Cluster, id)
		}
		return nil
	}
	if id == "" {
		return nil
	}
	for _, t := range registry.RecordTypes {
		if !t.Shared {
			continue
		}
		for range v.Paths(t.Bucket, "") {
			return registry.Errorf(registry.ErrConflict, "this node has volumes that cluster %q does not know; start it "+
				"without the cluster block, or stop the agent and move them: holdfast cluster migrate", id)
		}
	}
	return nil
}

// join stores that the node is a member, and makes the caller the active shim of its node: no commit of an earlier one
// succeeds any longer. It waits while another member has the name of this node, the node is new and expects another
// number of nodes than the cluster, or etcd does not let it write.
func (s *State) join(ctx context.Context) error {
	var self registry.Copy
	_, err := s.writeCopy(ctx, func(v registry.View) (registry.Change, error) {
		if self = s.copyIn(v); self.Member != "" {
			return registry.Change{}, nil
		}
		self.Member = uuid.NewString()
		return registry.Change{Put: []registry.Record{self}}, nil
	})
	for err == nil {
		why := s.checkFormation(ctx)
		if why == nil {
			why = s.register(ctx, self.Member)
		}
		if why == nil {
			return nil
		}
		s.waiting.Store(&why)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return err
}

// checkFormation returns an error if the cluster expects another number of nodes than this node does. A node that is
// registered stays one: it may have claims, and without a lease other nodes may fence it.
func (s *State) checkFormation(ctx context.Context) error {
	found, err := s.read(ctx, registry.Formation{Cluster: s.id}.Key())
	formation, _ := found.(registry.Formation)
	why := formation.Check(s.expect)
	if err != nil || why == nil {
		return err
	}
	found, err = s.read(ctx, registry.NodeRecord(s.node))
	if node, is := found.(registry.Node); is && node.State != registry.NodeForgotten || err != nil {
		return err
	}
	return why
}

// read returns a record of the cluster, as etcd has it; nil: there is none.
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

// lost reports whether a node of this name is out of service, fenced or forgotten, so that another machine may take its
// name.
func (s *State) lost(ctx context.Context) bool {
	key := registry.NodeRecord(s.node)
	found, err := s.kv.Get(ctx, s.record(key))
	if err != nil || len(found.Kvs) == 0 {
		return false
	}
	record, err := decode(key, found.Kvs[0])
	node, is := record.(registry.Node)
	return err == nil && is && node.Lost()
}

// register writes the node's key in etcd. It returns an ErrConflict if another member has the name of the node. A request
// whose answer was lost may be carried out late, so each is bound to what was registered before.
func (s *State) register(ctx context.Context, member string) error {
	key, id := s.keys.node(s.node), member+"/"+uuid.NewString()
	var conflict error
	err := s.request(ctx, func(ctx context.Context) error {
		for {
			was, err := s.kv.Get(ctx, key)
			if err != nil {
				return err
			}
			var revision int64
			for _, kv := range was.Kvs {
				switch value := string(kv.Value); {
				case value == id:
					s.own = kv.ModRevision
					return nil
				case !strings.HasPrefix(value, member+"/") && !s.lost(ctx):
					conflict = registry.Errorf(registry.ErrConflict, "another member of the cluster has the name %q; give this node "+
						"another name, or declare the other one out of service", s.node)
					return nil
				}
				revision = kv.ModRevision
			}
			if _, err := s.kv.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", revision)).
				Then(clientv3.OpPut(key, id)).Commit(); err != nil {
				return err
			}
		}
	})
	return errors.Join(err, conflict)
}
