package controller

import (
	"fmt"

	"holdfast/registry"
)

// limit bounds the number of claims, nodes or writers.
type limit int

const (
	none limit = iota
	one
	many
)

// rule is the row of one access mode in the table of the package comment.
type rule struct {
	claims, nodes, writers limit
}

var rules = map[registry.AccessMode]rule{
	registry.SingleNodeWriter:       {claims: one, nodes: one, writers: one},
	registry.SingleNodeReaderOnly:   {claims: one, nodes: one, writers: none},
	registry.SingleNodeSingleWriter: {claims: one, nodes: one, writers: one},
	registry.SingleNodeMultiWriter:  {claims: many, nodes: one, writers: many},
	registry.MultiNodeReaderOnly:    {claims: many, nodes: many, writers: none},
	registry.MultiNodeSingleWriter:  {claims: many, nodes: many, writers: one},
	registry.MultiNodeMultiWriter:   {claims: many, nodes: many, writers: many},
}

// Check returns an ErrInvalid if the usage contradicts itself.
func Check(u registry.Usage) error {
	r, known := rules[u.Access]
	switch {
	case !known:
		return registry.Invalid("unknown access mode %q; choose one of %v", u.Access, registry.AccessModes)
	case u.Attachment != registry.FileSystem && u.Attachment != registry.BlockDevice:
		return registry.Invalid("unknown attachment mode %q; choose %s or %s",
			u.Attachment, registry.FileSystem, registry.BlockDevice)
	case r.writers == none && !u.ReadOnly:
		return registry.Invalid("access mode %s allows no writes: set read_only = true", u.Access)
	}
	return nil
}

// Compatible returns the reason why claims a and b of one volume exclude each other, or an empty string if they do not.
// The order of the claims does not matter.
func Compatible(a, b registry.Claim) string {
	r, sameNode := rules[a.Usage.Access], a.Node == b.Node
	switch {
	case a.Usage.Attachment != b.Usage.Attachment:
		return "a volume is used either as a block device or as a file system"
	case a.Usage.Access != b.Usage.Access:
		return "all users of a volume use it in one access mode"
	case r.claims != many:
		return fmt.Sprintf("%s allows one user at a time", a.Usage.Access)
	case r.nodes == one && !sameNode:
		return fmt.Sprintf("%s allows one node at a time", a.Usage.Access)
	case r.writers == none && !(a.Usage.ReadOnly && b.Usage.ReadOnly):
		return fmt.Sprintf("%s allows no writes", a.Usage.Access)
	case r.writers == one && !a.Usage.ReadOnly && !b.Usage.ReadOnly:
		return fmt.Sprintf("%s allows one user that writes at a time", a.Usage.Access)
	case sameNode && a.Usage.Staging() != b.Usage.Staging():
		return "on one node, the file system type, mount flags and mount group of all users are the same"
	case ownershipsDiffer(a.Usage, b.Usage):
		return "all users that write set the same owner, group and mode in mount_options if one sets them recursively"
	}
	return ""
}

// ownershipsDiffer reports whether both usages write, both set the owner, group or mode of the files, but to different
// values, and at least one sets them recursively. One of them would change what the other has set.
func ownershipsDiffer(a, b registry.Usage) bool {
	x, y := a.Ownership, b.Ownership
	recursive := x.Recursive || y.Recursive
	x.Recursive, y.Recursive = false, false
	return recursive && x != y && x != (registry.Ownership{}) && y != (registry.Ownership{}) &&
		!a.ReadOnly && !b.ReadOnly
}
