package config

import (
	"crypto/sha256"
	"encoding/hex"

	"holdfast/hooks"
	"holdfast/registry"
)

// Source is a text and the name by which diagnostics call it.
type Source struct {
	Name string
	Text []byte
}

// Options say how a text is to be read. The zero value is usable.
type Options struct {
	// Variables are values from the command line, by name. A value is read as the variable's type says: as it stands
	// for a string, else as an HCL expression.
	Variables map[string]string
	// VariableFiles hold name = value lines. A later file wins over an earlier one, Variables over all of them.
	VariableFiles []Source
	// UnsetUnknown makes a variable without a value unknown; what depends on it is not checked. For `validate`.
	UnsetUnknown bool
	// Blocks are further names of blocks and attributes that the host carries, at any level of a job.
	Blocks []string
	// Operations are what the host can apply: a job that needs another is refused. Nil: not checked.
	Operations []hooks.Operation
	// ReadFile serves file(). Nil: file() is refused.
	ReadFile func(path string) ([]byte, error)
}

// ParseJob reads a job. The job is nil if any diagnostic is an error.
func ParseJob(src Source, opts Options) (*hooks.Job, registry.Diagnostics) {
	d := newDecoder(src, opts)
	root := d.parse(jobMaps)
	if root == nil {
		return nil, d.found()
	}
	job := d.file(root).job()
	if ds := d.found(); job == nil || ds.Err() != nil {
		return nil, ds
	}
	sum := sha256.Sum256(src.Text)
	job.Digest = hex.EncodeToString(sum[:])
	return job, d.found()
}

// ParseVolume reads a volume. The spec is nil if any diagnostic is an error.
func ParseVolume(src Source, opts Options) (*registry.VolumeSpec, registry.Diagnostics) {
	d := newDecoder(src, opts)
	root := d.parse(volumeMaps)
	if root == nil {
		return nil, d.found()
	}
	spec := d.file(root).volume()
	if ds := d.found(); spec == nil || ds.Err() != nil {
		return nil, ds
	}
	return spec, d.found()
}
