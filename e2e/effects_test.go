package e2e

import (
	"fmt"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

// outcomes are the events that tell that a call is done.
var outcomes = map[string]host.EventKind{
	"CreateVolume": registry.EventVolumeCreated, "DeleteVolume": registry.EventVolumeDeleted,
	"ControllerPublishVolume": registry.EventAttached, "ControllerUnpublishVolume": registry.EventDetached,
	"NodeStageVolume": registry.EventStaged, "NodeUnstageVolume": registry.EventUnstaged,
	"ControllerExpandVolume": registry.EventVolumeExpanded, "NodeExpandVolume": registry.EventNodeExpanded,
	"NodePublishVolume": registry.EventPublished, "NodeUnpublishVolume": registry.EventUnpublished,
}

// deed is one thing that happens to a volume at most once in the stories that effectsOnce judges.
type deed struct{ volume, rpc string }

// effectsOnce holds a journal and the events against each other, of volumes whose names are their ids and that are made, used once and deleted. Whatever was done to a
// volume has one event; all its calls have the same fields; after a good answer only another shim, which has not heard it, asks again; and
// nobody asks once the outcome is recorded.
func effectsOnce(calls []journal.Call, events []host.Event) (problems []string) {
	say := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	done := map[deed]time.Time{}
	for _, e := range events {
		for rpc, kind := range outcomes {
			if d := (deed{csifake.VolumeID(string(e.Volume.ID)), rpc}); e.Kind == kind {
				if _, before := done[d]; before {
					say("a second event of %s: %s", d, e)
				}
				done[d] = e.At
			}
		}
	}
	tries := map[deed][]journal.Call{}
	for _, c := range calls {
		if outcomes[c.RPC] != "" {
			d := deed{subjectOf(c), c.RPC}
			tries[d] = append(tries[d], c)
		}
	}
	for d, list := range tries {
		if _, known := done[d]; !known {
			say("no event tells of %s", d)
		}
		for i, c := range list[1:] {
			switch was := list[i]; {
			case c.Hash != was.Hash:
				say("%s is asked for again with other fields", d)
			case was.End != nil && was.End.Code == "OK" && c.Peer == was.Peer:
				say("%s is asked for again by the shim that has got its answer, %d", d, c.Peer)
			}
		}
		if last := list[len(list)-1]; last.Wall.After(done[d]) {
			say("%s is asked for at %s, and was recorded as done at %s", d, last.Wall, done[d])
		}
	}
	for d := range done {
		if len(tries[d]) == 0 {
			say("%s is told, and was never asked for", d)
		}
	}
	return problems
}

// subjectOf is the volume that a call is about, though it may be about to be made.
func subjectOf(c journal.Call) string {
	if c.RPC == "CreateVolume" {
		return csifake.VolumeID(c.Name)
	}
	return c.Volume
}
