package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
)

// variables holds the values of the flags that set variables.
type variables struct {
	values []string
	files  []string
}

func (v *variables) flags(c *cobra.Command) {
	c.Flags().StringArrayVar(&v.values, "var", nil, "set a variable: name=value; may be repeated")
	c.Flags().StringArrayVar(&v.files, "var-file", nil, "file of name = value lines; may be repeated")
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
			return nil, nil, readError(path, err)
		}
		files = append(files, host.Source{Name: path, Text: text})
	}
	return values, files, nil
}

// file is a job or a volume file.
type file struct {
	agent.Source
	volume bool
	err    error // why the file cannot be read
}

// maxFile bounds the size of a file that is read. The shim's own limit is smaller.
const maxFile = 512 << 10

// readFile reads a file, or the standard input if path is "-".
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
		return file{}, readError(path, err)
	}
	if len(text) > maxFile {
		return file{}, fmt.Errorf("%s is larger than %d KiB: not a job or volume file", path, maxFile>>10)
	}
	dir, err := filepath.Abs(filepath.Dir(path)) // the working directory if path is "-"
	return file{Source: agent.Source{Name: path, Dir: dir, Text: text}, volume: isVolume(path, text)}, err
}

// readError adds the path to an error of reading a file.
func readError(path string, err error) error {
	if errors.Is(err, unix.EISDIR) {
		return fmt.Errorf("%s: this is a directory; name a file", path)
	}
	if _, named := errors.AsType[*os.PathError](err); named {
		return err
	}
	return fmt.Errorf("read %s: %w", path, err)
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

// readFiles reads files that share variables. Each file gets only the variables that it declares.
func (v *variables) readFiles(paths []string) ([]file, error) {
	values, varFiles, err := v.read()
	if err != nil {
		return nil, err
	}
	used, unread := map[string]bool{}, false
	var out []file
	for _, path := range paths {
		f, err := readFile(path)
		unread = unread || err != nil
		f.Name, f.err = path, err
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

// submissions reads the files of a command, which are either all volume files or all job files. If there is only one
// file, it gets all variables, even those that it does not declare.
func (v *variables) submissions(paths []string, volume bool) ([]control.Submission, error) {
	if len(paths) == 1 {
		src, err := v.readOne(paths[0], volume)
		return []control.Submission{src}, err
	}
	files, err := v.readFiles(paths)
	if err != nil {
		return nil, err
	}
	var out []control.Submission
	for _, f := range files {
		err = errors.Join(err, f.err, f.checkKind(volume))
		out = append(out, f.Source)
	}
	return out, err
}

// checkKind returns an error if the file is a volume file instead of a job file, or the other way round.
func (f file) checkKind(volume bool) error {
	switch {
	case f.volume && !volume:
		return fmt.Errorf("%s: this is a volume file; use holdfast volume create or holdfast volume register", f.Name)
	case volume && jobHead.Match(f.Text):
		return fmt.Errorf("%s: this is a job file; use holdfast job run", f.Name)
	}
	return nil
}

// readOne reads the only file of a command, a volume or a job. The file gets all variables.
func (v *variables) readOne(path string, volume bool) (control.Submission, error) {
	values, files, err := v.read()
	if err != nil {
		return control.Submission{}, err
	}
	f, err := readFile(path)
	f.Variables, f.Files = values, files
	if err == nil {
		err = f.checkKind(volume)
	}
	return f.Source, err
}

// declares reports whether a file declares a variable, in a block of its own or in a variables block, whose closing
// brace begins a line. A JSON file with variables may declare any.
func declares(text []byte, name string) bool {
	name = regexp.QuoteMeta(name)
	return regexp.MustCompile(`(?m)^\s*"?variable"?\s+"?` + name + `"?\s*\{|"variable"\s*:` +
		`|^\s*variables\s*\{([^}]|[^\n]\})*?\s` + name + `\s*=`).Match(text)
}
