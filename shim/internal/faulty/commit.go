package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"holdfast/internal/fault"
	"holdfast/registry"
	"holdfast/shim/internal/lifecycle"
)

// commit executes the faults that are set for this point of a commit, for one commit at a time.
func (p *program) commit(point lifecycle.CommitPoint, c registry.Change) {
	p.commits.Lock()
	defer p.commits.Unlock()
	name := "store"
	if point == lifecycle.BeforeEtcd {
		name = "etcd"
	}
	after := point == lifecycle.AfterStore
	_ = p.at(c, func(f fault.Fault) bool { return f.At == name && f.After == after })
}

// killAt appends the point of a commit and its writes to the file f.With + ".trace". It kills the process if the file
// f.With names this point and these writes. That file has "NUMBER POINT: WRITES"; the number counts down to 1. The
// caller holds program.commits.
func killAt(f fault.Fault, c registry.Change) {
	writes := describe(c)
	if len(writes) == 0 {
		return
	}
	point := f.At + " before"
	if f.After {
		point = f.At + " after"
	}
	trace, err := os.OpenFile(f.With+".trace", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	must(err)
	_, err = fmt.Fprintf(trace, "%s: %s\n", point, strings.Join(writes, " "))
	must(err)
	must(trace.Close())
	wanted, _ := os.ReadFile(f.With)
	number, line, _ := strings.Cut(string(wanted), " ")
	at, changes, found := strings.Cut(line, ": ")
	if !found || at != point || slices.ContainsFunc(strings.Fields(changes), func(w string) bool {
		return !slices.Contains(writes, w)
	}) {
		return
	}
	if n, err := strconv.Atoi(number); err == nil && n > 1 {
		must(os.WriteFile(f.With, fmt.Appendf(nil, "%d %s", n-1, line), 0o600))
		return
	}
	must(os.Remove(f.With))
	killSelf()
}

// describe returns the writes of a change, sorted: +BUCKET or -BUCKET, and the fields with the progress of the record.
// Nodes, leases and the progress of the copy are left out, because they are written at any time.
func describe(c registry.Change) (writes []string) {
	for _, r := range c.Put {
		bucket := r.Key().Bucket
		switch bucket {
		case registry.BucketCopies, registry.BucketNodeLeases, registry.BucketNodes:
			continue
		}
		var fields map[string]any
		text, err := json.Marshal(r)
		must(err)
		must(json.Unmarshal(text, &fields))
		write := "+" + string(bucket)
		for _, name := range []string{"rpc", "method", "state", "outcome", "publish", "phase", "holder", "done"} {
			if v, is := fields[name]; is {
				write += fmt.Sprintf(":%v", v)
			}
		}
		writes = append(writes, write)
	}
	for _, k := range c.Delete {
		if k.Bucket != registry.BucketNodeLeases {
			writes = append(writes, "-"+string(k.Bucket))
		}
	}
	slices.Sort(writes)
	return slices.Compact(writes)
}
