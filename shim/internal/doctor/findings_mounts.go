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

// pathKind is the purpose of a path below the mount root.
type pathKind int

const (
	otherPath    pathKind = iota // not made for a volume
	stagingPath                  // where a volume is staged
	targetPath                   // where a volume is published
	partPath                     // where a part of a volume is mounted
	targetParent                 // the directory of one target or part
)

// pathShapes recognizes the paths that a Layout makes. The IDs in the paths are hashed, so it compares only the shapes.
type pathShapes struct{ root, stage, publish, parts, name string }

func shapesOf(l hooks.Layout) pathShapes {
	stage := l.Staging(registry.VolumeKey{}, registry.Tree{}).Host
	publish := l.Target(registry.ClaimKey{}, registry.Tree{}).Host
	parts := filepath.Base(filepath.Dir(filepath.Dir(l.Part(registry.ClaimKey{}, ""))))
	return pathShapes{l.MountRoot() + "/", filepath.Dir(stage), filepath.Dir(filepath.Dir(publish)), parts,
		filepath.Base(publish)}
}

func (s pathShapes) kind(path string) pathKind {
	rel, below := strings.CutPrefix(path, s.root)
	names := strings.Split(rel, "/")
	switch {
	case !below:
	case names[0] == s.parts && len(names) == 2:
		return targetParent
	case names[0] == s.parts && len(names) == 3 && names[2] == s.name:
		return partPath
	case names[0] == s.parts:
	case len(names) == 3 && names[1] == s.stage:
		return stagingPath
	case len(names) == 3 && names[1] == s.publish:
		return targetParent
	case len(names) == 4 && names[1] == s.publish && names[3] == s.name:
		return targetPath
	}
	return otherPath
}

// unknownMounts lists the mounts that no record names, the oldest first and each mount point once. A mount that a
// plugin makes for a claim has a record before it is made. unknownMounts leaves out a mount inside another mount at a
// volume's path: the inner mount is a user of the outer one.
func (e *examiner) unknownMounts() (found mount.Mounts) {
	seen, outer := map[string]bool{}, map[string]bool{}
	for _, m := range e.Mounts {
		if e.shapes.kind(m.Point) != otherPath {
			outer[m.Point] = true
		}
	}
	for _, m := range e.Mounts {
		if !seen[m.Point] && !covers(e.known, m.Point) && !covers(outer, filepath.Dir(m.Point)) {
			seen[m.Point] = true
			found = append(found, m)
		}
	}
	return found
}

// examineUnknownMounts examines the mounts that no record names.
func (e *examiner) examineUnknownMounts() {
	list := e.unknownMounts()
	unused := e.unusedMounts(list)
	for _, m := range list {
		f := registry.Finding{Kind: registry.FoundOrphan, Path: m.Point}
		what := fmt.Sprintf("%s %s is mounted here", m.FSType, m.Source)
		if n := e.stacks[m.Point]; n > 1 {
			what += fmt.Sprintf(" on top of %d more", n-1)
		}
		v, adoptable := e.adoptable(m.Point)
		name := v.VolumeName()
		claim, claimed := e.claimants[m.Point]
		switch kind := e.shapes.kind(m.Point); {
		case kind == otherPath || kind == targetParent:
			f.Detail = what + ", and this is no path of a volume"
			f.Advice = "leave it if a plugin made it for itself; else unmount it: " + display.Command("umount", m.Point)
		case !unused[m.Point]:
			f.Kind = registry.FoundUsed
			f.Detail = what + ", is not in any record, and " + e.usedBy(m.Point)
			f.Advice = "stop what uses it, then run holdfast doctor again; it is not touched while it is in use"
		case claimed:
			f.Action, f.Volume, f.Name = registry.ActUnmount, claim.Volume, claim.Name
			f.Detail = fmt.Sprintf("%s, is not in any record, and is in the way of volume %s for alloc %s", what,
				claim.Name, claim.Alloc)
			f.Advice = "unmount it if nothing uses it: holdfast doctor --repair; the alloc is then tried again"
		case adoptable:
			f.Action, f.Volume, f.Name = registry.ActAdopt, v.VolumeKey(), name
			f.Detail = fmt.Sprintf("%s, where volume %s is staged: no record says that it is, and it has no claim",
				what, name)
			f.Advice = fmt.Sprintf("record it, so that plugin %s is asked to take it down: holdfast doctor --repair",
				v.Plugin)
			if !e.Live { // only a shim knows the name of this node, which the record of an attachment needs
				f.Action, f.Advice = registry.ActNothing, "start the agent, then run holdfast doctor --repair"
			}
		case v.External != "":
			f.Volume, f.Name = v.VolumeKey(), name
			f.Detail = fmt.Sprintf("%s, where volume %s is staged, and no record says that it is", what, name)
			f.Advice = "wait for the call that is open for the volume, then run holdfast doctor again: " +
				display.ObjectCommand("holdfast volume status", name.Namespace, string(name.ID))
		default:
			f.Action = registry.ActUnmount
			f.Detail = what + ", and is not in any record"
			f.Advice = "unmount it if nothing uses it: holdfast doctor --repair"
		}
		e.add(f)
	}
}

// adoptable returns the volume with this staging path, and whether it can be recorded as staged. It can if it has no
// open call and no record of a stage.
func (e *examiner) adoptable(path string) (registry.Volume, bool) {
	v, known := e.stageable[path]
	return v, known && !e.versions[v.VolumeKey()].Open && e.placements[v.VolumeKey()].Staging.State == registry.MarkNone
}

// unusedMounts returns which of the mounts at paths of volumes are unused. A mount whose only users are other unused
// mounts is unused too, because these are unmounted first.
func (e *examiner) unusedMounts(list mount.Mounts) map[string]bool {
	unused := map[string]bool{}
	for _, m := range list {
		kind := e.shapes.kind(m.Point)
		if e.UsersError == "" && (kind == stagingPath || kind == targetPath || kind == partPath) {
			unused[m.Point] = true
		}
	}
	for again := true; again; {
		again = false
		for point := range unused {
			for _, u := range e.Users[point] {
				if u.Mount == "" || !unused[u.Mount] { // "": a process, or a mount in another namespace
					delete(unused, point)
					again = true
				}
			}
		}
	}
	return unused
}

// maxNamed is the number of users that a finding names.
const maxNamed = 3

func (e *examiner) usedBy(point string) string {
	users := e.Users[point]
	if e.UsersError != "" {
		return "its users cannot be found: " + e.UsersError
	}
	var names []string
	for _, u := range users[:min(maxNamed, len(users))] {
		names = append(names, u.Text)
	}
	if more := len(users) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return "it is in use: " + strings.Join(names, "; ")
}

// examineSocketDirs examines mounts on the directories of plugins' sockets. No mount belongs there.
func (e *examiner) examineSocketDirs() {
	for _, m := range e.Sockets {
		e.add(registry.Finding{
			Kind: registry.FoundOrphan, Path: m.Point,
			Detail: fmt.Sprintf("%s %s is mounted here, and hides a plugin's socket or a part of its directory",
				m.FSType, m.Source),
			Advice: "leave it if the plugin made it for itself; else unmount it: " + display.Command("umount", m.Point),
		})
	}
}

// examineDirs examines the directories of volumes that no record names. The directories above them belong to the
// plugin, whose task has them mounted. The directories below them do not belong to Holdfast.
func (e *examiner) examineDirs() {
	counted := map[string]int{} // by directory: entries that are directories of volumes
	stays := map[string]bool{}  // directories that contain a directory that stays
	for _, d := range e.Dirs {
		up := filepath.Dir(d.Path)
		if e.shapes.kind(d.Path) == otherPath {
			continue
		}
		counted[up]++
		others := d.Entries - counted[d.Path]
		switch {
		case e.stacks[d.Path] > 0, e.mountsBelow[d.Path], covers(e.known, d.Path), e.awaited(d.Path):
			stays[up] = true
		case others > 0:
			stays[up] = true
			e.add(registry.Finding{
				Kind: registry.FoundLeft, Path: d.Path,
				Detail: fmt.Sprintf("this directory is not in any record, and has %d entries", others),
				Advice: "move away what was written there while no volume was mounted; then the directory is removed",
			})
		case stays[d.Path]:
			stays[up] = true
		default:
			e.add(registry.Finding{Kind: registry.FoundEmpty, Action: registry.ActRemove, Path: d.Path,
				Detail: "this directory is not in any record, and is empty",
				Advice: "remove it: holdfast doctor --repair"})
		}
	}
}

// awaited reports whether a call that will soon be recorded may use the directory. Without a running shim there is no
// such call: the shim that made the directory has died, and the next call makes it again.
func (e *examiner) awaited(dir string) bool { return e.Live && covers(e.expected, dir) }
