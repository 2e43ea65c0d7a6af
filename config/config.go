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
	job, ds := parseFile(src, opts, jobMaps, (*file).job)
	if job != nil {
		sum := sha256.Sum256(src.Text)
		job.Digest = hex.EncodeToString(sum[:])
	}
	return job, ds
}

// ParseVolume reads a volume. The spec is nil if any diagnostic is an error.
func ParseVolume(src Source, opts Options) (*registry.VolumeSpec, registry.Diagnostics) {
	return parseFile(src, opts, volumeMaps, (*file).volume)
}

// ParseCluster reads a file with one cluster block. The result is nil if any diagnostic is an error.
func ParseCluster(src Source, opts Options) (*Cluster, registry.Diagnostics) {
	return parseFile(src, opts, mapNames{}, (*file).cluster)
}

func parseFile[T any](src Source, opts Options, maps mapNames, read func(*file) *T) (*T, registry.Diagnostics) {
	d := newDecoder(src, opts)
	var result *T
	if root := d.parse(src, maps); root != nil {
		result = read(d.file(root))
	}
	ds := d.diagnostics()
	if ds.Err() != nil {
		return nil, ds
	}
	return result, ds
}
