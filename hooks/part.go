package hooks

import (
	"maps"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"holdfast/registry"
)

// Limits of a sub_path in bytes: PATH_MAX less its closing zero, and NAME_MAX.
const (
	MaxSubPath = 4095
	maxName    = 255
)

// Part is a part of a volume that tasks of an alloc mount.
type Part struct {
	Path     string
	ReadOnly bool // all tasks mount it read-only, so it is not made if it is missing
}

// Parts lists the parts of a request's volume that tasks mount, each once, in the order of their paths.
func (s GroupSpec) Parts(request registry.RequestName) (parts []Part) {
	written := map[string]bool{}
	for _, mounts := range s.Mounts {
		for _, m := range mounts {
			if m.Volume == request && m.SubPath != "" {
				written[m.SubPath] = written[m.SubPath] || !m.ReadOnly
			}
		}
	}
	for _, p := range slices.Sorted(maps.Keys(written)) {
		parts = append(parts, Part{Path: p, ReadOnly: !written[p]})
	}
	return parts
}

// For returns the spec with the references in its sub_paths resolved for an alloc.
func (s GroupSpec) For(alloc registry.AllocID, index uint64) (GroupSpec, error) {
	placed := make(map[string][]VolumeMount, len(s.Mounts))
	for task, mounts := range s.Mounts {
		placed[task] = slices.Clone(mounts)
		for i, m := range mounts {
			resolved := resolve(m.SubPath, alloc, index)
			if wrong := wrongSubPath(resolved); m.SubPath != "" && wrong != "" {
				return s, registry.Invalid("task %q: sub_path %q of volume %q %s", task, resolved, m.Volume, wrong)
			}
			placed[task][i].SubPath = resolved
		}
	}
	s.Mounts = placed
	return s, nil
}

// resolve resolves the references that differ from alloc to alloc. The author of a job knows the values of all others.
func resolve(text string, alloc registry.AllocID, index uint64) string {
	return Expand(text, map[string]string{"NOMAD_ALLOC_ID": string(alloc),
		"NOMAD_ALLOC_INDEX": strconv.FormatUint(index, 10)})
}

// WrongSubPath returns why a sub_path with unresolved references cannot be used by every alloc, or an empty string.
func WrongSubPath(text string) string {
	longest := registry.AllocID(strings.Repeat("x", registry.MaxID))
	return wrongSubPath(resolve(text, longest, math.MaxUint64))
}

// wrongSubPath returns why a sub_path with resolved references is wrong, or an empty string. An empty sub_path is wrong
// too: a variable that is not set must not turn a part of a volume into all of it.
func wrongSubPath(s string) string {
	tooLong := func(name string) bool { return len(name) > maxName }
	names := strings.Split(s, "/")
	switch {
	case s == "" || s == ".":
		return `must name a directory or a file in the volume, as in "a/b"; leave it out to mount all of the volume`
	case strings.Contains(s, "${"):
		return "may refer to ${NOMAD_ALLOC_ID} and ${NOMAD_ALLOC_INDEX}, and to nothing else that is known at run " +
			"time only"
	case !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl):
		return "must be UTF-8 without control characters"
	case strings.HasPrefix(s, "/"):
		return `must be relative to the volume's root, as in "a/b"`
	case slices.Contains(names, ".."):
		return `must not contain ".."`
	case path.Clean(s) != s:
		return `must be a clean path, as in "a/b"`
	case len(s) > MaxSubPath:
		return "must have at most 4095 bytes"
	case slices.ContainsFunc(names, tooLong):
		return "must not have a name of more than 255 bytes in it"
	}
	return ""
}
