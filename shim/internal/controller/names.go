package controller

import (
	"context"
	"sync"

	"holdfast/registry"
)

// nameAt is what a volume is called at its plugin's controller: CreateVolumeRequest.name.
type nameAt struct {
	plugin registry.PluginID
	name   string
}

// names says which volumes may have been created under a name, so that nobody looks at all volumes for that while others wait for the log. All of
// those are in it, and maybe others: whoever asks looks at their records.
type names struct {
	mu     sync.Mutex // guards all below; held for no longer than a look-up, but for a load
	of     map[nameAt]map[registry.VolumeName]bool
	spare  int  // how many are added before it is loaded anew, without those that were deleted
	joined bool // or forgotten: what was read before that may lack some
}

// fewNames is how many deleted volumes are remembered at least before names are loaded anew.
const fewNames = 1000

// join adds a volume that is about to be created, and gives the others that may have its name. view is the decision's, so that no other one is
// created meanwhile.
func (n *names) join(view registry.View, v registry.Volume) (others []registry.VolumeName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.joined = true
	if n.spare == 0 {
		n.load(view)
	}
	n.spare--
	n.add(v)
	for other := range n.of[nameAt{v.Plugin, v.Name}] {
		if other != v.VolumeName() {
			others = append(others, other)
		}
	}
	return others
}

// forget has all of it loaded anew: what it was loaded from may never have come true.
func (n *names) forget() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.joined = true
	n.spare = 0
}

// learn loads it before anybody joins. If somebody was quicker, or the log cannot be read, that is all right too.
func (n *names) learn(ctx context.Context, log registry.Log) {
	var created []registry.Volume
	if err := log.View(ctx, func(view registry.View) error { created = createdIn(view); return nil }); err != nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.joined { // else volumes may have been created since that view
		n.set(created)
	}
}

func (n *names) load(view registry.View) { n.set(createdIn(view)) }

func createdIn(view registry.View) []registry.Volume {
	return view.VolumesWhere(func(v registry.Volume) bool { return v.Created })
}

func (n *names) set(created []registry.Volume) {
	n.of = map[nameAt]map[registry.VolumeName]bool{}
	for _, v := range created {
		n.add(v)
	}
	n.spare = max(fewNames, len(created))
}

func (n *names) add(v registry.Volume) {
	at := nameAt{v.Plugin, v.Name}
	if n.of[at] == nil {
		n.of[at] = map[registry.VolumeName]bool{}
	}
	n.of[at][v.VolumeName()] = true
}
