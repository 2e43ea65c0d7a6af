package cluster

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
)

// line is one line of the history, which all nodes append to. The order of lines is an order in time: a call's begin
// is written before the call, its end after it.
type line struct {
	Kind   string // see below
	Node   string
	Alloc  string `json:",omitempty"`
	Volume string `json:",omitempty"`
	Mode   string `json:",omitempty"`
	Write  bool   `json:",omitempty"`
	Sealed []byte `json:",omitempty"` // of the alloc, with its first prepare
	Error  string `json:",omitempty"` // of an end; empty: success
	// Refused: the error of a prepare is that another alloc holds the volume.
	Refused bool `json:",omitempty"`
}

// The kinds of lines. The first four are about an alloc.
const (
	prepareBegins = "prepare"
	prepareEnded  = "prepared"
	releaseBegins = "release"
	releaseEnded  = "released"
	ready         = "ready"    // the node has opened its host
	swapped       = "swapped"  // its shim
	stopped       = "stopped"  // all its allocs are released
	verified      = "verified" // Error says what is left after all were released
	lost          = "lost"     // the harness has killed all that runs on the node, for good
	declared      = "declared" // another node is out of service or fenced, as this one was asked to see to
	created       = "created"  // all volumes
	deleted       = "deleted"  // all volumes
	broken        = "broken"   // Error is a failure that no fault of the harness explains
)

// use is the use of a volume by an alloc, as its access mode sees it.
type use struct {
	Alloc, Node, Mode string
	Write             bool
}

func (l line) use() use { return use{l.Alloc, l.Node, l.Mode, l.Write} }

// excludes returns whether two uses of a volume must not be at the same time, by the words of the CSI specification.
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

// readHistory returns the complete lines of a history from an offset on, and the offset after them.
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
