package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/config"
	"holdfast/registry"
)

// movable are the buckets of records that Migrate moves, in this order. Volumes are last, so that a volume that other
// nodes see already has its claims and attachments. A node outside a cluster has no executors, late calls or remote
// calls.
var movable = []registry.Bucket{
	registry.BucketDeregistered, registry.BucketAttachments, registry.BucketClaims, registry.BucketEndpointUses,
	registry.BucketSnapshots, registry.BucketGroupSnapshots, registry.BucketVolumes,
}

const (
	// batchSize is how many records one transaction writes. With their index entries and the log these are fewer than
	// the 128 operations that etcd allows.
	batchSize = 30
	// migrateTimeout bounds each request of Migrate, retries included.
	migrateTimeout = 30 * time.Second
)

// SecretUse says where a secret of a volume or snapshot is. Nodes share this place, but not the secret itself.
type SecretUse struct {
	Of     string `json:"of"` // the volume or snapshot, for people
	Plugin string `json:"plugin"`
	Key    string `json:"key"`
	registry.Secret
}

// Migrate moves the volumes, snapshots and claims of a node outside a cluster into a cluster, and makes the node its
// member. It returns the number of records moved. Before it moves anything, it calls before with the secrets that other
// nodes will need. No shim of the node may run. If a call is unfinished or the cluster has other records with the same
// keys, Migrate refuses and moves nothing. An interrupted migration can be repeated, because the node becomes a member
// only once the cluster has all its records.
func Migrate(
	ctx context.Context, local registry.State, c config.Cluster, node registry.NodeName, before func([]SecretUse),
) (moved int, err error) {
	s, err := dial(c, local, node)
	if err != nil {
		return 0, err
	}
	defer func() { _ = s.client.Close() }()
	return s.migrate(ctx, before)
}

func (s *State) migrate(ctx context.Context, before func([]SecretUse)) (moved int, err error) {
	m := migration{State: s, present: map[registry.Key]string{}, volumes: map[registry.VolumeKey]registry.VolumeName{}}
	switch err := m.readCluster(ctx); {
	case errors.Is(err, registry.ErrInvalid):
		return 0, err
	case err != nil:
		return 0, fmt.Errorf("%w; check endpoints and tls of the cluster block", unavailable(err))
	}
	if err := s.local.View(ctx, m.readNode); err != nil || m.member {
		return 0, err
	}
	before(m.secrets)
	for batch := range slices.Chunk(m.records, batchSize) {
		if err := m.write(ctx, batch); err != nil {
			return 0, err
		}
	}
	_, err = s.local.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Put: []registry.Record{registry.Copy{Cluster: s.id, Member: uuid.NewString()}}}, nil
	})
	return m.total, err
}

// migration is one run of Migrate.
type migration struct {
	*State
	revision int64 // the revision of present
	present  map[registry.Key]string
	volumes  map[registry.VolumeKey]registry.VolumeName // the volumes of the cluster

	member  bool              // the node is a member already
	total   int               // how many records the node has
	records []registry.Record // records that the cluster does not have yet
	secrets []SecretUse
}

// readCluster reads the records of the cluster. It fails if the cluster expects another number of nodes than the
// cluster block says.
func (m *migration) readCluster(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, migrateTimeout)
	defer cancel()
	m.revision, err = m.readAll(ctx, func(key registry.Key, kv *mvccpb.KeyValue) error {
		m.present[key] = string(kv.Value)
		if key.Bucket != registry.BucketFormations && key.Bucket != registry.BucketVolumes {
			return nil
		}
		record, err := decode(key, kv)
		switch r := record.(type) {
		case registry.Formation:
			return r.Check(m.expect)
		case registry.Volume:
			if r.External != "" {
				m.volumes[r.VolumeKey()] = r.VolumeName()
			}
		}
		return err
	})
	return err
}

// readNode reads the records of the node, and checks whether they can be moved.
func (m *migration) readNode(v registry.View) error {
	if copies := v.Copies(); len(copies) > 0 {
		m.member = copies[0].Cluster == m.id
		return CheckMember(v, m.id)
	}
	if intents := v.Intents(); len(intents) > 0 {
		open := intents[0]
		return registry.Errorf(registry.ErrConflict, "%s of volume %q has been unfinished since %s: "+
			"start the agent without the cluster block, and wait until the volume is ready",
			open.RPC, open.Name, open.Since.UTC().Format(time.RFC3339))
	}
	for _, bucket := range movable {
		for path := range v.Paths(bucket, "") {
			if err := m.add(v.Get(registry.Key{Bucket: bucket, Path: path})); err != nil {
				return err
			}
		}
	}
	return nil
}

// add adds a record of the node to those to be moved, unless the cluster has it already. It returns an ErrConflict if
// the cluster has another record with that key or the same volume under another name, or if the record names another
// node.
func (m *migration) add(r registry.Record) error {
	m.total++
	var node registry.NodeName // which uses or stores the volume; empty: none
	switch r := r.(type) {
	case registry.Claim:
		node = r.Node
	case registry.Attachment:
		node = r.Node
	case registry.EndpointUse:
		node = r.Node
	case registry.VolumeSnapshot:
		node = r.Node
		if r.State.Unfinished() { // its call may still run here, which the cluster would not know
			return registry.Errorf(registry.ErrConflict, "%s is %s: start the agent without the cluster block, and "+
				"wait until that has ended", nameOf(r), r.State)
		}
		m.addSecrets(r, r.Plugin, r.Secrets)
	case registry.Volume:
		node = r.Node
		m.addSecrets(r, r.Plugin, r.Secrets)
		if other, found := m.volumes[r.VolumeKey()]; found && other != r.VolumeName() {
			return registry.Errorf(registry.ErrConflict,
				"volume %q of this node is volume %q of the cluster: deregister one of them", r.VolumeName(), other)
		}
	}
	if node != "" && node != m.node {
		return registry.Errorf(registry.ErrConflict, "a volume is used or stored by node %q, but this node is called "+
			"%q: configure the name that it had", node, m.node)
	}
	text, err := json.Marshal(registry.Indexed(r, 0, 0))
	if err != nil {
		return registry.Errorf(registry.ErrInternal, "encode %s: %w", r.Key().Bucket, err)
	}
	switch m.present[r.Key()] {
	case "":
		m.records = append(m.records, r)
	case string(text):
	default:
		return registry.Errorf(registry.ErrConflict, "the cluster has another %s: deregister it on one side", nameOf(r))
	}
	return nil
}

// addSecrets adds the secrets of a record to those that other nodes will need.
func (m *migration) addSecrets(r registry.Record, plugin registry.PluginID, secrets map[string]registry.Secret) {
	for _, key := range slices.Sorted(maps.Keys(secrets)) {
		m.secrets = append(m.secrets, SecretUse{nameOf(r), string(plugin), key, secrets[key]})
	}
}

// nameOf names a record to people.
func nameOf(r registry.Record) string {
	switch r := r.(type) {
	case registry.Volume:
		return fmt.Sprintf("volume %q", r.VolumeName())
	case registry.VolumeSnapshot:
		return fmt.Sprintf("snapshot %s/%s", r.Namespace, r.ID)
	}
	return fmt.Sprintf("record of %s with the key %q", r.Key().Bucket, r.Key().Path)
}

// write writes records if neither they nor their neighbours in an index have changed in the cluster since readCluster.
// A new neighbour may be the same volume, which another node has registered under another name.
func (m *migration) write(ctx context.Context, batch []registry.Record) error {
	ctx, cancel := context.WithTimeout(ctx, migrateTimeout)
	defer cancel()
	change := registry.Change{Put: batch}
	read := newReads(nil, m.keys)
	for _, r := range batch {
		for _, entry := range registry.IndexKeys(r) {
			prefix := entry.Path[:len(entry.Path)-len(r.Key().Path)] // an index entry ends with the path of its record
			read.prefixes[m.record(registry.Key{Bucket: entry.Bucket, Path: prefix})] = true
		}
	}
	d := decision{change: change}
	err := m.local.View(ctx, func(v registry.View) (err error) { d.values, err = valuesOf(v, change); return err })
	if err != nil {
		return err
	}
	writes, err := m.operations(ctx, d, uuid.NewString())
	if err != nil {
		return unavailable(err)
	}
	var answer *clientv3.TxnResponse
	err = m.request(ctx, func(ctx context.Context) (err error) {
		answer, err = m.kv.Txn(ctx).If(read.guards(change, m.revision).conditions()...).Then(writes...).Commit()
		return err
	})
	switch {
	case err != nil:
		return fmt.Errorf("%w; repeat the migration", unavailable(err))
	case !answer.Succeeded:
		return registry.Errorf(registry.ErrConflict,
			"the cluster's records have changed meanwhile; repeat the migration")
	}
	return nil
}
