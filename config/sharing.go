package config

import (
	"fmt"

	"holdfast/hooks"
	"holdfast/registry"
)

// groupFacts holds the group settings that volume blocks depend on.
type groupFacts struct {
	jobFacts
	group string
	count int
}

// checkUse reports a usage that no volume can support, by Nomad's rules.
func (f *file) checkUse(in *fields, v hooks.VolumeRequest, facts groupFacts) {
	if in.isTrue("sticky") {
		f.errorf(in.rangeOf("sticky"), "remove it", "sticky is for host volumes")
	}
	if f.unsure(in.block) {
		return
	}
	if v.Usage.Access.ReaderOnly() && !v.Usage.ReadOnly {
		f.errorf(in.rangeOf("access_mode"), "add read_only = true", "the access mode %s never allows a write",
			v.Usage.Access)
	}
	switch {
	case v.Ephemeral != nil:
	case v.PerAlloc:
		f.checkPerAlloc(in, facts)
	case facts.count > 1:
		f.checkShared(in, v.Usage, facts)
	}
}

func (f *file) checkPerAlloc(in *fields, facts groupFacts) {
	if perNode(facts.kind) {
		f.errorf(in.rangeOf("per_alloc"), "remove it, or use a job of type service",
			"per_alloc is not possible in a job of type %s", facts.kind)
	}
	if facts.canary {
		f.errorf(in.rangeOf("per_alloc"), "remove canary from the update block",
			"per_alloc is not possible with canaries: the old and the new alloc would want one volume")
	}
}

// checkShared reports more users than the access mode allows. All allocs of the group share the volume.
func (f *file) checkShared(in *fields, u registry.Usage, facts groupFacts) {
	switch mode := u.Access; {
	case singleNode(mode):
		f.errorf(in.rangeOf("access_mode"),
			"use per_alloc = true for a volume per alloc, a multi-node access mode, or count = 1",
			"the %d allocs of group %q cannot share a volume with the access mode %s", facts.count, facts.group,
			mode)
	case mode == registry.MultiNodeSingleWriter && !u.ReadOnly:
		f.errorf(in.rangeOf("access_mode"), "use read_only = true, per_alloc = true, or count = 1",
			"only one of the %d allocs of group %q could write with the access mode %s", facts.count, facts.group, mode)
	}
}

func singleNode(mode registry.AccessMode) bool {
	switch mode {
	case registry.SingleNodeWriter, registry.SingleNodeReaderOnly, registry.SingleNodeSingleWriter,
		registry.SingleNodeMultiWriter:
		return true
	}
	return false
}

// checkTogether reports conflicting requests of one alloc for the same volume, which would deadlock. Two compatible
// requests for a volume are valid.
func (f *file) checkTogether(asked *requests) {
	for i, b := range asked.csi {
		for _, a := range asked.csi[:i] {
			if a.Ephemeral != nil || b.Ephemeral != nil || a.Source == "" || a.Source != b.Source ||
				a.PerAlloc != b.PerAlloc {
				continue
			}
			first, second := asked.blocks[string(a.Name)], asked.blocks[string(b.Name)]
			if why, advice := usageConflict(a.Usage, b.Usage); why != "" && !f.unsure(first) && !f.unsure(second) {
				f.errorf(second.head, advice, "%q and %q are the same volume, %q: %s", a.Name, b.Name, a.Source, why)
				break
			}
		}
	}
}

// usageConflict returns why one alloc cannot use a volume in both ways, and advice. It returns empty strings if no
// conflict is known. Fields that a usage leaves unset are not compared.
func usageConflict(a, b registry.Usage) (why, advice string) {
	mode := a.Access
	switch {
	case a.Access == "" || b.Access == "" || a.Attachment == "" || b.Attachment == "":
		return "", "" // reported, or unknown
	case a.Attachment != b.Attachment:
		return "it is either a block device or a file system", "give both the same attachment_mode"
	case a.Access != b.Access:
		return fmt.Sprintf("it has one access mode at a time, not %s and %s", a.Access, b.Access),
			"give both the same access_mode"
	case singleNode(mode) && mode != registry.SingleNodeMultiWriter:
		return fmt.Sprintf("%s allows one user at a time", mode),
			"keep one: a task may mount it twice, once with read_only = true; or use single-node-multi-writer"
	case mode == registry.MultiNodeSingleWriter && !a.ReadOnly && !b.ReadOnly:
		return fmt.Sprintf("%s allows one writer at a time", mode), "add read_only = true to one of them"
	case differ(a.FSType, b.FSType) || differ(a.MountFlags, b.MountFlags) || differ(a.MountGroup, b.MountGroup),
		differ(a.Ownership.Owner, b.Ownership.Owner) || differ(a.Ownership.Group, b.Ownership.Group) ||
			differ(a.Ownership.Mode, b.Ownership.Mode):
		return "it is staged once, with one set of mount options", "give both the same mount_options"
	}
	return "", ""
}

// differ reports whether both values are set and different.
func differ[T ~string](a, b T) bool { return a != "" && b != "" && a != b }
