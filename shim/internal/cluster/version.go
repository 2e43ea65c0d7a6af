package cluster

import (
	"context"
	"fmt"
)

// warnOfVersions logs a warning for each member of etcd whose version may show old records after the member was paused.
func (n *Node) warnOfVersions(ctx context.Context) {
	for _, endpoint := range n.client.Endpoints() {
		limited, cancel := context.WithTimeout(ctx, tryTimeout)
		status, err := n.client.Status(limited, endpoint)
		cancel()
		if err == nil && outdated(status.Version) { // other loops report a member that does not answer
			n.log.Warn("etcd may show old records after a pause of this member; use 3.5.28, 3.6.9 or later",
				"endpoint", endpoint, "version", status.Version)
		}
	}
}

// outdated reports whether a version of etcd lacks the fix for old records after a pause. It is false if the text is
// not a version.
func outdated(version string) bool {
	var major, minor, patch int
	if n, _ := fmt.Sscanf(version, "%d.%d.%d", &major, &minor, &patch); n != 3 || major != 3 {
		return false
	}
	switch minor {
	case 5:
		return patch < 28
	case 6:
		return patch < 9
	}
	return minor < 5
}
