//go:build taskparent

package taskdriver

import "errors"

// containerConfig is unused here, because the parent process runs no container.
type containerConfig struct{}

// attachProgram is unused here: for a task with devices, the parent is the orchestrator's own program.
func (devicePolicy) attachProgram(string) error {
	return errors.New("this program has no device programs")
}
