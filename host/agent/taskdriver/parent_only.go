//go:build taskparent

package taskdriver

import "errors"

// containerConfig is unused: the parent process runs no container.
type containerConfig struct{}

// attachProgram is unused: the parent of a task with devices is the orchestrator's own program.
func (devicePolicy) attachProgram(string) error {
	return errors.New("this program has no device programs")
}
