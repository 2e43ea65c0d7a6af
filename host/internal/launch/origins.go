package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"time"
)

// originsFile is in the store's directory.
const originsFile = "origins.json"

// origin is what Add found at a path last.
type origin struct {
	SHA256 string    `json:"sha256"`
	Trust  Trust     `json:"trust"`
	Added  time.Time `json:"added"`
}

// record notes what is at path and why it is trusted, and returns the digest that was noted before if it is another. It
// writes nothing that is noted already.
func (s *Store) record(path string, d Digest) (replaces string, err error) {
	known := s.origins()
	before := known[path]
	if before.SHA256 == d.SHA256 && before.Trust == d.Trust {
		return "", nil
	}
	if before.SHA256 != d.SHA256 {
		replaces = before.SHA256
	}
	s.forgetPruned(known)
	known[path] = origin{SHA256: d.SHA256, Trust: d.Trust, Added: time.Now().UTC().Truncate(time.Second)}
	if err := s.writeOrigins(known); err != nil {
		return replaces, fmt.Errorf("record the shim %s: %w", path, err)
	}
	return replaces, nil
}

// origins are by path. A file that is lost or damaged is no hindrance: a binary is never trusted because of it alone, but
// only where its content has the digest.
func (s *Store) origins() map[string]origin {
	known := make(map[string]origin)
	text, err := os.ReadFile(filepath.Join(s.dir, originsFile))
	if err != nil || json.Unmarshal(text, &known) != nil || known == nil {
		return make(map[string]origin)
	}
	maps.DeleteFunc(known, func(_ string, o origin) bool {
		sum, err := parseSum(o.SHA256)
		return err != nil || sum != o.SHA256
	})
	return known
}

// forgetPruned keeps the record from growing with every binary there ever was.
func (s *Store) forgetPruned(known map[string]origin) {
	maps.DeleteFunc(known, func(_ string, o origin) bool {
		_, err := os.Lstat(s.path(o.SHA256))
		return errors.Is(err, fs.ErrNotExist)
	})
}

func (s *Store) writeOrigins(known map[string]origin) error {
	text, err := json.MarshalIndent(known, "", "  ")
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(s.dir, temporary)
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // gone after the rename
	_, err = tmp.Write(append(text, '\n'))
	if err := errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), filepath.Join(s.dir, originsFile)); err != nil {
		return err
	}
	return syncDir(s.dir)
}
