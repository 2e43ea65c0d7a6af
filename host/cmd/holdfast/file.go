package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent"
)

// variables are the flags for values of variables.
type variables struct {
	values []string
	files  []string
}

func (v *variables) flags(c *cobra.Command) {
	c.Flags().StringArrayVar(&v.values, "var", nil, "set a variable: name=value (repeatable)")
	c.Flags().StringArrayVar(&v.files, "var-file", nil, "file of name = value lines (repeatable)")
}

func (v *variables) read() (values map[string]string, files []host.Source, err error) {
	values = map[string]string{}
	for _, text := range v.values {
		name, value, is := strings.Cut(text, "=")
		if !is || name == "" {
			return nil, nil, usageError{fmt.Errorf("--var %q: write name=value", text)}
		}
		values[name] = value
	}
	for _, path := range v.files {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, nil, err
		}
		files = append(files, host.Source{Name: path, Text: text})
	}
	return values, files, nil
}

// file is a job or a volume file.
type file struct {
	agent.Source
	volume bool
	err    error // why it cannot be read
}

// maxFile bounds the read; the shim accepts less.
const maxFile = 512 << 10

// readFile reads a file; "-" is the standard input.
func readFile(path string) (file, error) {
	from := io.Reader(os.Stdin)
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return file{}, err
		}
		defer f.Close()
		from = f
	}
	text, err := io.ReadAll(io.LimitReader(from, maxFile+1))
	if err != nil {
		if _, named := errors.AsType[*os.PathError](err); named {
			return file{}, err
		}
		return file{}, fmt.Errorf("read %s: %w", path, err)
	}
	if len(text) > maxFile {
		return file{}, fmt.Errorf("%s is larger than %d KiB: not a job or volume file", path, maxFile>>10)
	}
	return file{Source: agent.Source{Name: path, Text: text}, volume: isVolume(path, text)}, nil
}

var (
	jobHead     = regexp.MustCompile(`(?m)^\s*"?(job|task)"?\s*("|:|\{)`)
	pluginField = regexp.MustCompile(`(?m)^\s*"?plugin_id"?\s*[=:]`)
)

// isVolume recognizes a volume file by its name, or by the fields that begin its lines. The shim validates it.
func isVolume(path string, text []byte) bool {
	if strings.HasSuffix(path, ".volume.hcl") || strings.HasSuffix(path, ".volume.json") {
		return true
	}
	return !jobHead.Match(text) && pluginField.Match(text)
}

// readFiles reads files that share variables. Each gets the variables that it declares.
func (v *variables) readFiles(paths []string) ([]file, error) {
	values, varFiles, err := v.read()
	if err != nil {
		return nil, err
	}
	used, unread := map[string]bool{}, false
	var out []file
	for _, path := range paths {
		f, err := readFile(path)
		f.Name, f.err, unread = path, err, unread || err != nil
		f.Files, f.Variables = varFiles, map[string]string{}
		for name, value := range values {
			if declares(f.Text, name) {
				f.Variables[name], used[name] = value, true
			}
		}
		out = append(out, f)
	}
	for name := range values {
		if !used[name] && !unread {
			return nil, usageError{fmt.Errorf("--var %s: no file declares this variable", name)}
		}
	}
	return out, nil
}

func declares(text []byte, name string) bool {
	return regexp.MustCompile(`(?m)^\s*"?variable"?\s+"?` + regexp.QuoteMeta(name) +
		`"?\s*\{|"variable"\s*:`).Match(text)
}

func parseOptions(f file, validate bool) host.ParseOptions {
	return host.ParseOptions{Variables: f.Variables, VariableFiles: f.Files, Validate: validate}
}
