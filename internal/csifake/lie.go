package csifake

import "slices"

// Lie is what a call does instead of what it says it has done. It answers OK.
type Lie string

const (
	NoEffect Lie = "no-effect" // nothing at all, not in the backend either; the answer is empty
	NoMount  Lie = "no-mount"  // the backend has it, nothing is mounted; the target is there, and bare
	// mounted at a path beside the one that was asked for (Beside); the target is there, and bare
	Elsewhere   Lie = "elsewhere"
	Symlink     Lie = "symlink"      // the target is a symbolic link to what is mounted at the path beside it
	WrongData   Lie = "wrong-data"   // the data of another volume is mounted
	Stacked     Lie = "stacked"      // mounted twice, one on the other
	Writable    Lie = "writable"     // mounted read-write though read-only was asked for
	KeepMount   Lie = "keep-mount"   // the backend has forgotten it, but the mount and the target stay
	LeaveTarget Lie = "leave-target" // unmounted, but the target stays

	// a volume is made, and is empty: a plugin that does not know volume_content_source
	IgnoreSource Lie = "ignore-source"
)

var (
	ups     = []string{"NodeStageVolume", "NodePublishVolume"}
	publish = []string{"NodePublishVolume"}
	downs   = []string{"NodeUnstageVolume", "NodeUnpublishVolume"}
)

// lies are all of them, with the calls that can tell them. An empty name is every call.
var lies = map[Lie][]string{NoEffect: {""}, NoMount: ups, Elsewhere: ups, Symlink: publish, WrongData: ups,
	Stacked:  ups,
	Writable: publish, KeepMount: downs, LeaveTarget: {"NodeUnpublishVolume"}, IgnoreSource: {"CreateVolume"}}

func (l Lie) fits(rpc string) bool {
	return slices.Contains(lies[l], rpc) || slices.Contains(lies[l], "")
}

// hollow tells whether what the call was asked for is not the case.
func (l Lie) hollow() bool {
	return l != "" && l != Stacked && l != LeaveTarget && l != IgnoreSource
}

// Beside is the path at which a volume is mounted that lies elsewhere.
func Beside(path string) string { return path + ".elsewhere" }
