package doctor

import (
	"fmt"
	"path/filepath"

	"holdfast/registry"
)

// directories judges the directories of volumes that no record knows. Those above them are the plugin's, whose task has them mounted; those
// below them are what somebody wrote.
func (j *judge) directories() {
	counted := map[string]int{} // by directory: entries that are directories of volumes
	stays := map[string]bool{}  // directories with one below that cannot be removed
	for _, d := range j.Dirs {
		up := filepath.Dir(d.Path)
		switch {
		case j.places.of(d.Path) == elsewhere:
			continue
		case j.stacks[d.Path] > 0, j.over[d.Path], covered(d.Path, j.known), j.awaited(d.Path):
			stays[up] = true
			counted[up]++
			continue
		}
		counted[up]++
		own := d.Entries - counted[d.Path]
		switch {
		case own > 0:
			stays[up] = true
			j.found(registry.Finding{
				Kind: registry.FoundLeft, Path: d.Path, Detail: fmt.Sprintf("no record knows this directory, and it has %d entries", own),
				Advice: "look at what was written there while no volume was mounted, and move it away; then it is removed",
			})
		case stays[d.Path]:
			stays[up] = true
		default:
			j.found(registry.Finding{Kind: registry.FoundEmpty, Action: registry.ActRemove, Path: d.Path,
				Detail: "no record knows this directory, and it is empty", Advice: "have it removed: holdfast doctor --repair"})
		}
	}
}

// awaited says whether somebody may have made the directory for a call that he is about to record. Without a shim nobody is: the one that
// made it has died before that, and whoever makes the call makes it again.
func (j *judge) awaited(dir string) bool { return j.Live && covered(dir, j.expected) }
