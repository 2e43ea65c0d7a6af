package cluster

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// driver is the name of the CSI driver.
const driver = "csifake.example.org"

// interval is a use of a volume between two lines of a journal.
type interval struct {
	use
	volume   string
	from, to int
}

// overlaps returns an error for each pair of simultaneous uses that exclude each other.
func overlaps(all []interval) (errs []string) {
	for i, a := range all {
		for _, b := range all[:i] {
			if a.volume == b.volume && a.from < b.to && b.from < a.to && excludes(a.use, b.use) {
				errs = append(errs, fmt.Sprintf("volume %s is used at once by %+v (lines %d to %d) and %+v (lines %d "+
					"to %d)", a.volume, b.use, b.from, b.to, a.use, a.from, a.to))
			}
		}
	}
	return errs
}

// judgeJournal returns the violations in the driver's journal: calls that CSI forbids, simultaneous uses that exclude
// each other, and attachments that the storage system had to refuse. settled means that everything was taken down.
func judgeJournal(path string, settled bool) (errs []string) {
	for _, v := range csifake.Check(path, journal.Options{Settled: settled, ByNode: true}) {
		errs = append(errs, "journal: "+v.String())
	}
	lines, err := journal.Read(path)
	if err != nil {
		return append(errs, err.Error())
	}
	type target struct{ volume, node, path string }
	published := map[target]int{} // the index in all
	var all []interval
	calls := map[string]journal.Line{}
	for i, l := range lines {
		id := fmt.Sprint(l.Run, l.Call)
		began := calls[id]
		at := target{began.Volume, instance(l), began.Target}
		n, known := published[at]
		switch {
		case l.Kind == journal.Reboot:
			for at, n := range published {
				if at.node+"-id" == l.Node {
					all[n].to = i
					delete(published, at)
				}
			}
		case l.Kind == journal.Begin:
			calls[id] = l
			at = target{l.Volume, instance(l), l.Target}
			if _, known := published[at]; l.RPC == "NodePublishVolume" && !known {
				published[at] = len(all)
				all = append(all, interval{use{Alloc: l.Target, Node: instance(l), Mode: modeOf(l.Usage),
					Write: !l.ReadOnly},
					l.Volume, i, math.MaxInt})
			}
		case l.Kind == journal.End && began.RPC == "NodeUnpublishVolume" && known &&
			(l.Code == "OK" || l.Code == "NOT_FOUND"):
			all[n].to = i
			delete(published, at)
		case l.Kind == journal.End && began.RPC == "ControllerPublishVolume" && l.Code == "FAILED_PRECONDITION":
			errs = append(errs, fmt.Sprintf("the storage system refused to attach volume %s to %s: line %d",
				began.Volume, began.Node, i+1))
		}
	}
	return append(errs, overlaps(all)...)
}

// instance returns the node of the plugin instance that wrote the line.
func instance(l journal.Line) string { return l.Instance }

// modeOf returns the access mode of a usage in a journal, spelled as in a volume file.
func modeOf(usage string) string {
	for _, mode := range modes {
		if strings.Contains(usage, strings.ToUpper(strings.ReplaceAll(mode, "-", "_"))) {
			return mode
		}
	}
	return usage
}

// judgeWrites returns the violations in the files that tasks have written to their volumes. A task writes one line when
// it begins to use its volume, and one line when it ends.
func judgeWrites(dir string) (errs []string) {
	files, err := filepath.Glob(filepath.Join(dir, "*", writesFile))
	if err != nil || len(files) == 0 {
		return append(errs, fmt.Sprintf("no task has written to a volume below %s: %v", dir, err))
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			errs = append(errs, err.Error())
		}
		var all []interval
		open := map[string]int{} // the index in all, by alloc
		for i, l := range strings.Split(strings.TrimSpace(string(text)), "\n") {
			var what string
			u := use{Write: true}
			if _, err := fmt.Sscan(l, &what, &u.Alloc, &u.Node, &u.Mode); err != nil {
				errs = append(errs, fmt.Sprintf("%s: line %d is %q: %v", file, i+1, l, err))
			}
			if n, known := open[u.Alloc]; known {
				all[n].to = i // a killed task writes no end, and counts until its last line
			} else {
				open[u.Alloc] = len(all)
				all = append(all, interval{u, filepath.Base(filepath.Dir(file)), i, i})
			}
		}
		errs = append(errs, overlaps(all)...)
	}
	return errs
}
