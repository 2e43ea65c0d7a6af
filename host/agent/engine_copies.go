package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"holdfast/host"
)

// engineCopy is the path of the copy of an engine mount's record. An agent that lost its ledger needs it: otherwise the
// shim would release a volume that containers use. Like the copy of an alloc's record, it is not synced to disk.
func (a *Agent) engineCopy(id host.VolumeID) string {
	return filepath.Join(a.config.StateDir, "agent", "engine_mounts", string(id)+".json")
}

// saveEngineCopy saves the copy of a record, or removes it if the record is nil. The caller continues after an error,
// because the ledger has the record.
func (a *Agent) saveEngineCopy(id host.VolumeID, m *EngineMount) {
	path := a.engineCopy(id)
	var err error
	if m == nil {
		err = os.Remove(path)
	} else if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
		err = writeCopy(path, m)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.log.Warn("cannot write a copy of the record of a container engine's mount", "volume", id, "error", err)
	}
}

// addEngineCopies adds the copies of records that the ledger lacks, or has of an earlier mount. A copy of another mount
// than the recorded one is newer, because a copy is removed before its record. A copy that cannot be read is ignored: a
// power cut has damaged it, and ended all containers. addEngineCopies then saves a copy of each record, because earlier
// versions of the agent saved none.
func (a *Agent) addEngineCopies() error {
	entries, err := os.ReadDir(filepath.Dir(a.engineCopy("")))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list the copies of container engines' mounts: %w", err)
	}
	for _, e := range entries {
		name, isCopy := strings.CutSuffix(e.Name(), ".json")
		if !isCopy {
			continue
		}
		id, m := host.VolumeID(name), &EngineMount{}
		text, err := os.ReadFile(a.engineCopy(id))
		if err == nil {
			err = json.Unmarshal(text, m)
		}
		if err != nil || m.Volume != id {
			a.log.Warn("cannot read the copy of the record of a container engine's mount", "volume", id, "error", err)
			continue
		}
		if recorded := a.engine.known[id]; recorded == nil || recorded.Alloc != m.Alloc {
			a.log.Warn("agent.db has no current record of a container engine's mount; using its copy", "volume", id)
			a.engine.known[id] = m
		}
	}
	for id, m := range a.engine.known {
		a.saveEngineCopy(id, m)
	}
	return nil
}
