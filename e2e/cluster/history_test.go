package cluster

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
)

// line is one line of the history, which all nodes append to. The order of lines is their order in time: the line of a
// call's begin is written before the call, and that of its end after the call.
type line struct {
	Kind   string // see below
	Node   string
	Alloc  string `json:",omitempty"`
	Volume string `json:",omitempty"`
	Mode   string `json:",omitempty"`
	Write  bool   `json:",omitempty"`
	Sealed []byte `json:",omitempty"` // the sealed job of the alloc, in the line of its first prepare
	Error  string `json:",omitempty"` // the error of a call that has ended; empty: success
	// Refused means that a prepare failed because another alloc holds the volume.
	Refused bool `json:",omitempty"`
}

// Kinds of lines. The first four are about an alloc.
const (
	prepareBegins = "prepare"
	prepareEnded  = "prepared"
	releaseBegins = "release"
	releaseEnded  = "released"
	ready         = "ready"    // the node has opened its host
	swapped       = "swapped"  // the node has swapped its shim
	stopped       = "stopped"  // all allocs of the node are released
	verified      = "verified" // Error says what is left after all allocs were released
	lost          = "lost"     // the harness has killed all processes of the node for good
	declared      = "declared" // another node is out of service or fenced, at the harness's request
	created       = "created"  // the node has created all volumes
	deleted       = "deleted"  // the node has deleted all volumes
	broken        = "broken"   // Error is a failure that no fault of the harness explains
)

// use is the use of a volume by an alloc, with all that access modes depend on.
type use struct {
	Alloc, Node, Mode string
	Write             bool
}

func (l line) use() use { return use{l.Alloc, l.Node, l.Mode, l.Write} }

// excludes reports whether the CSI specification forbids two uses of a volume at the same time.
func excludes(a, b use) bool {
	if a.Mode != b.Mode {
		return true
	}
	switch a.Mode {
	case "single-node-multi-writer":
		return a.Node != b.Node
	case "multi-node-reader-only":
		return a.Write || b.Write
	case "multi-node-single-writer":
		return a.Write && b.Write
	case "multi-node-multi-writer":
		return false
	}
	return true // single-node-writer, single-node-reader-only, single-node-single-writer: one at a time
}

// readHistory returns the complete lines of a history after an offset, and the offset after these lines.
func readHistory(path string, from int64) (lines []line, next int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, from, err
	}
	defer f.Close()
	if _, err := f.Seek(from, 0); err != nil {
		return nil, from, err
	}
	for r := bufio.NewReader(f); ; {
		text, err := r.ReadBytes('\n')
		if err != nil || !bytes.HasSuffix(text, []byte("\n")) {
			return lines, from, nil
		}
		from += int64(len(text))
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			return nil, from, fmt.Errorf("history at %d: %w", from, err)
		}
		lines = append(lines, l)
	}
}

func appendLine(path string, l line) error {
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(append(text, '\n'))
	return err
}
