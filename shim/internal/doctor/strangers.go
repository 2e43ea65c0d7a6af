package doctor

import (
	"fmt"
	"path/filepath"
	"strings"

	"holdfast/hooks"
	"holdfast/internal/display"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// place is what a path below the mount root is for.
type place int

const (
	elsewhere place = iota // not for volumes: a plugin's own, or what somebody wrote
	staging                // a staging path
	target                 // a target path
	part                   // where a part of a volume is mounted
	parent                 // the directory of one target or part
)

// places tells them apart by the shape of the paths that Layout makes, whatever ids are hashed into them.
type places struct{ root, stage, publish, parts, name string }

func placesOf(l hooks.Layout) places {
	stage, publish := l.Staging(registry.VolumeKey{}, registry.Tree{}).Host, l.Target(registry.ClaimKey{}, registry.Tree{}).Host
	parts := filepath.Base(filepath.Dir(filepath.Dir(l.Part(registry.ClaimKey{}, ""))))
	return places{l.MountRoot() + "/", filepath.Dir(stage), filepath.Dir(filepath.Dir(publish)), parts, filepath.Base(publish)}
}

func (p places) of(path string) place {
	rel, below := strings.CutPrefix(path, p.root)
	names := strings.Split(rel, "/")
	switch {
	case !below:
	case names[0] == p.parts && len(names) == 2:
		return parent
	case names[0] == p.parts && len(names) == 3 && names[2] == p.name:
		return part
	case names[0] == p.parts:
	case len(names) == 3 && names[1] == p.stage:
		return staging
	case len(names) == 3 && names[1] == p.publish:
		return parent
	case len(names) == 4 && names[1] == p.publish && names[3] == p.name:
		return target
	}
	return elsewhere
}

// Unknown lists the mounts that no record knows and no claim explains, the oldest first: of them repair has to know who
// uses them. What is mounted inside one of them is not listed: it is a use.
func Unknown(f Facts) mount.Mounts { return newJudge(f).unknown() }

func (j *judge) unknown() (found mount.Mounts) {
	seen, outer := map[string]bool{}, map[string]bool{}
	for _, m := range j.Mounts {
		if j.places.of(m.Point) != elsewhere {
			outer[m.Point] = true
		}
	}
	for _, m := range j.Mounts {
		if !seen[m.Point] && !covered(m.Point, j.known) && !covered(m.Point, j.expected) && !covered(filepath.Dir(m.Point), outer) {
			seen[m.Point] = true
			found = append(found, m)
		}
	}
	return found
}

// strangers judges the mounts that no record knows.
func (j *judge) strangers() {
	list := j.unknown()
	free := j.unused(list)
	for _, m := range list {
		f := registry.Finding{Kind: registry.FoundOrphan, Path: m.Point}
		what := fmt.Sprintf("%s of %s is mounted here", m.FSType, m.Source)
		if n := j.stacks[m.Point]; n > 1 {
			what += fmt.Sprintf(" on top of %d more", n-1)
		}
		v, adoptable := j.adoptable(m.Point)
		name := v.VolumeName()
		switch at := j.places.of(m.Point); {
		case at == elsewhere || at == parent:
			f.Detail = what + ", and this is no place for volumes: no record can know it"
			f.Advice = "leave it if a plugin made it for itself; else unmount it: " + display.Command("umount", m.Point)
		case !free[m.Point]:
			f.Kind = registry.FoundUsed
			f.Detail = what + ", no record knows it, and " + j.usedBy(m.Point)
			f.Advice = "end what uses it, then look again; it is not touched while it is used"
		case adoptable:
			f.Action, f.Volume, f.Name = registry.ActAdopt, v.VolumeKey(), name
			f.Detail = fmt.Sprintf("%s, where volume %s is staged: no record says that it is, and nobody claims it", what, name)
			f.Advice = fmt.Sprintf("have it recorded, so that plugin %s is asked to take it down: holdfast doctor --repair", v.Plugin)
		case v.External != "":
			f.Volume, f.Name = v.VolumeKey(), name
			f.Detail = fmt.Sprintf("%s, where volume %s is staged, and no record says that it is", what, name)
			f.Advice = "wait for the call that is open for the volume, then look again: " + display.Command(
				"holdfast volume status --namespace="+display.Quote(string(name.Namespace)), string(name.ID))
		default:
			f.Action = registry.ActUnmount
			f.Detail = what + ", and no record knows it"
			f.Advice = "have it unmounted if nobody uses it: holdfast doctor --repair"
		}
		j.found(f)
	}
}

// sockets judges what is mounted on the directories of plugins' sockets, where only files are.
func (j *judge) sockets() {
	for _, m := range j.Sockets {
		j.found(registry.Finding{
			Kind: registry.FoundOrphan, Path: m.Point,
			Detail: fmt.Sprintf("%s of %s is mounted here, and hides the socket of a plugin, or a part of its directory",
				m.FSType, m.Source),
			Advice: "leave it if the plugin made it for itself; else unmount it: " + display.Command("umount", m.Point),
		})
	}
}

// adoptable is the volume that is staged at the path, if it is known, and nobody is about to use it.
func (j *judge) adoptable(path string) (registry.Volume, bool) {
	v, known := j.stageable[path]
	return v, known && !j.open[v.VolumeKey()] && j.placed[v.VolumeKey()].Stage == registry.MarkNone
}

// unused are those mounts at places of volumes that nobody uses but others of them, which go first.
func (j *judge) unused(list mount.Mounts) map[string]bool {
	free := map[string]bool{}
	for _, m := range list {
		if at := j.places.of(m.Point); j.Unasked == "" && (at == staging || at == target || at == part) {
			free[m.Point] = true
		}
	}
	for again := true; again; {
		again = false
		for point := range free {
			for _, u := range j.Users[point] {
				if u.Mount == "" || !free[u.Mount] {
					delete(free, point)
					again = true
				}
			}
		}
	}
	return free
}

// named is how many users are named.
const named = 3

func (j *judge) usedBy(point string) string {
	users := j.Users[point]
	if j.Unasked != "" {
		return "it cannot be said who uses it: " + j.Unasked
	}
	var names []string
	for _, u := range users[:min(named, len(users))] {
		names = append(names, u.Text)
	}
	if more := len(users) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return "it is used: " + strings.Join(names, "; ")
}
