package launch

import (
	"fmt"
	"os"
	"path/filepath"

	"holdfast/registry"
)

// checkNamespace refuses a shim of which any thread is in another mount namespace than this host. Where this user may not know, nothing is refused.
func checkNamespace(pid int) error {
	ours, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil
	}
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/ns/mnt", pid))
	for _, link := range threads {
		if theirs, err := os.Readlink(link); err == nil && theirs != ours {
			return registry.Errorf(registry.ErrUnsupported, "the shim is in a mount namespace of its own (%s, this host is in %s): what it mounts would "+
				"never reach this host and its tasks; start both in one, without unshare(1) or nsenter(1) around the shim alone", theirs, ours)
		}
	}
	return nil
}
