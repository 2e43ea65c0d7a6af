package disk

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Store has the records of a data directory. Any number of processes may have it open.
type Store struct {
	path string // absolute, without symbolic links
	root *os.Root
}

// OpenStore opens or makes a data directory.
func OpenStore(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	path, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, fmt.Errorf("open the data directory: %w", err)
	}
	for _, name := range []string{"volumes", "nodes", "images", "dirs"} {
		if err := root.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, errors.Join(fmt.Errorf("data directory: %w", err), root.Close())
		}
	}
	return &Store{path: path, root: root}, nil
}

// Close closes the data directory.
func (s *Store) Close() error { return s.root.Close() }

// Path returns the data directory, absolute and without symbolic links.
func (s *Store) Path() string { return s.path }

// Check returns an error if the data directory is gone.
func (s *Store) Check() error {
	if _, err := s.root.Stat("volumes"); err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	return nil
}

func recordFile(id ID) string { return "volumes/" + string(id) + ".json" }

// Load reads a record in any state.
func (s *Store) Load(id ID) (Record, error) {
	text, err := s.root.ReadFile(recordFile(id))
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, Errorf(ErrNotFound, "%s does not exist", id)
	}
	if err != nil {
		return Record{}, fmt.Errorf("read the record of %s: %w", id, err)
	}
	return decode(id, text)
}

// Find reads the record of a volume or snapshot that is ready.
func (s *Store) Find(id ID) (Record, error) {
	r, err := s.Load(id)
	if err == nil && r.State != Ready {
		err = Errorf(ErrNotFound, "%s does not exist: it is incomplete", id)
	}
	return r, err
}

// IDs lists the IDs of all records in order.
func (s *Store) IDs() ([]ID, error) {
	entries, err := fs.ReadDir(s.root.FS(), "volumes")
	if err != nil {
		return nil, fmt.Errorf("list the records: %w", err)
	}
	var ids []ID
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), ".json"); ok && mintedID.MatchString(id) {
			ids = append(ids, ID(id))
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// All reads the records of some kinds, or of all, in the order of IDs.
func (s *Store) All(kinds ...Kind) ([]Record, error) {
	ids, err := s.IDs()
	if err != nil {
		return nil, err
	}
	var all []Record
	for _, id := range ids {
		if len(kinds) > 0 && !slices.Contains(kinds, id.Kind()) {
			continue
		}
		r, err := s.Load(id)
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

// Node is a node that works with this directory.
type Node struct {
	ID       string            `json:"node"`
	Topology map[string]string `json:"topology"`
}

// AddNode records that a node works with this directory.
func (s *Store) AddNode(n Node) error {
	return s.accounting(func() error { return s.replace("nodes/"+digest(n.ID)+".json", n) })
}

// Nodes lists the nodes that ever worked with this directory.
func (s *Store) Nodes() ([]Node, error) {
	entries, err := fs.ReadDir(s.root.FS(), "nodes")
	if err != nil {
		return nil, fmt.Errorf("list the nodes: %w", err)
	}
	var nodes []Node
	for _, e := range entries {
		if filepath.Ext(e.Name()) != ".json" {
			continue
		}
		var n Node
		text, err := s.root.ReadFile("nodes/" + e.Name())
		if err != nil {
			return nil, fmt.Errorf("read a node's record: %w", err)
		}
		if err := json.Unmarshal(text, &n); err != nil {
			return nil, Errorf(ErrDamaged, "record of a node, %s: %w", e.Name(), err)
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
}

// replace writes a file as a whole. The caller holds the lock that guards it.
func (s *Store) replace(name string, value any) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	if err := s.writeSynced(name+".tmp", append(text, '\n')); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := s.root.Rename(name+".tmp", name); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return s.syncDir(filepath.Dir(name))
}

func (s *Store) writeSynced(name string, text []byte) error {
	f, err := s.root.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Sync(), f.Close())
}

// erase removes files durably. Missing files are no error.
func (s *Store) erase(names ...string) error {
	for _, name := range names {
		if err := s.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove %s: %w", name, err)
		}
		if err := s.syncDir(filepath.Dir(name)); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) syncDir(name string) error {
	d, err := s.root.Open(name)
	if err != nil {
		return fmt.Errorf("sync %s: %w", name, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync %s: %w", name, err)
	}
	return nil
}
