package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// ExamineLedger says what is wrong with the agent's ledger below a state directory, for a doctor beside which no agent runs. It changes
// nothing. A state directory that no agent has used has no ledger, and that is well.
func ExamineLedger(state string) (found host.Finding, wrong bool) {
	path := filepath.Join(state, "agent", "agent.db")
	found = host.Finding{
		Kind: registry.FoundDamage, Path: path,
		Advice: "put a good copy in its place, or start the agent with --recover=adopt, which makes the records again from " +
			filepath.Join(state, "agent", "allocs"),
	}
	err := examineLedger(state)
	switch {
	case err == nil:
		return host.Finding{}, false
	case errors.Is(err, berrors.ErrTimeout):
		found.Kind, found.Advice = registry.FoundUnseen, "see why that agent does not answer, then look again"
		found.Detail = "the agent's records are locked: an agent runs that does not answer here"
	case errors.Is(err, fs.ErrPermission):
		found.Kind, found.Advice = registry.FoundUnseen, "look as the user who runs the agent"
		found.Detail = fmt.Sprintf("the agent's records cannot be read: %v", err)
	default:
		found.Detail = fmt.Sprintf("the agent's records cannot be used, and no agent starts: %v", err)
	}
	return found, true
}

func examineLedger(state string) error {
	path := filepath.Join(state, "agent", "agent.db")
	info, err := os.Stat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err != nil || info.Size() == 0 {
		allocs, _ := os.ReadDir(allocsDir(state))
		if len(allocs) > 0 {
			return fmt.Errorf("the file is gone or empty, and there are %d directories of allocs", len(allocs))
		}
		return unknownTasks(state, nil)
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, Timeout: 200 * time.Millisecond})
	if err != nil {
		return err
	}
	err = db.View(func(tx *bolt.Tx) error { return whole(path, tx.Size()) })
	if err == nil {
		var allocs map[host.AllocID]*AllocRecord
		if _, allocs, err = (&ledger{db: db}).load(); err == nil {
			err = unknownTasks(state, allocs)
		}
	}
	return errors.Join(err, db.Close())
}

// unknownTasks says which tasks of this state directory run whose allocs have no record.
func unknownTasks(state string, allocs map[host.AllocID]*AllocRecord) error {
	parents, err := taskdriver.Parents(state)
	if err != nil {
		return fmt.Errorf("list the tasks that run: %w", err)
	}
	var unknown []string
	for _, p := range parents {
		if id, ours := allocOf(state, p); ours && allocs[id] == nil {
			unknown = append(unknown, fmt.Sprintf("%s (process %d)", p.ID, p.PID))
		}
	}
	if len(unknown) > 0 {
		return fmt.Errorf("no record knows these tasks, which run: %s", strings.Join(unknown, ", "))
	}
	return nil
}
