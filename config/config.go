package config

import (
	"crypto/sha256"
	"encoding/hex"

	"holdfast/hooks"
	"holdfast/registry"
)

// Source is the text of a file and its name in diagnostics.
type Source struct {
	Name string
	Text []byte
}

// Options configure parsing. The zero value is usable.
type Options struct {
	// Variables maps names to values from the command line. A value of primitive or unknown type is taken as is.
	// Any other value is an HCL expression.
	Variables map[string]string
	// VariableFiles hold name = value lines. A later file overrides an earlier one. Variables overrides all files.
	VariableFiles []Source
	// UnsetUnknown makes a variable without a value unknown, for `validate`. Values that depend on it are not checked.
	UnsetUnknown bool
	// Blocks lists additional names of blocks and attributes that the host accepts at any level of a job.
	Blocks []string
	// Operations lists the operations that the host supports. A job that needs another one is an error. Nil disables
	// the check.
	Operations []hooks.Operation
	// ReadFile implements file(). If nil, file() is an error.
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
