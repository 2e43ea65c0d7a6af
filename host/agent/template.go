package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"holdfast/hooks"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/secretfile"
	"holdfast/registry"
)

// templateBlock is a template block of a task. The text is written before each attempt and does not change afterwards.
// Other attributes of the block therefore have no effect.
type templateBlock struct {
	Data        *string           `json:"data"`
	Source      string            `json:"source"`
	Destination string            `json:"destination"`
	Env         bool              `json:"env"`
	Perms       taskdriver.Scalar `json:"perms"` // octal
	ChangeMode  string            `json:"change_mode"`
	Left        string            `json:"left_delimiter"`
	Right       string            `json:"right_delimiter"`
}

// fileTemplate is a template block: a Go template with the functions env and file.
type fileTemplate struct {
	destination string // with references as in ${NOMAD_TASK_DIR}
	env         bool   // its lines are variables of the task
	mode        fs.FileMode
	body        *template.Template
	advice      string // for errors: what to write instead
}

func newTemplate(b templateBlock) (t fileTemplate, err error) {
	invalid := func(format string, args ...any) (fileTemplate, error) {
		return t, registry.Invalid("template %s: "+format, append([]any{cmp.Or(b.Destination, "without destination")},
			args...)...)
	}
	t = fileTemplate{destination: b.Destination, env: b.Env, mode: 0o644}
	if b.Perms != "" {
		mode, err := strconv.ParseUint(string(b.Perms), 8, 12)
		if err != nil || mode > 0o777 {
			return invalid("perms %q is no octal number up to 777; write it as in \"640\"", b.Perms)
		}
		t.mode = fs.FileMode(mode)
	}
	switch {
	case b.Destination == "":
		return invalid(`write where the file goes, as in destination = "local/config.json"`)
	case b.Data == nil || b.Source != "":
		return invalid(`write the text in data; data = file("path") takes it from a file`)
	case !slices.Contains([]string{"", "noop", "restart", "signal", "script"}, b.ChangeMode):
		return invalid("unknown change_mode %q; use noop or restart", b.ChangeMode)
	}
	if _, err := t.path(nil); err != nil {
		return t, err
	}
	left, right := cmp.Or(b.Left, "{{"), cmp.Or(b.Right, "}}")
	t.advice = strings.NewReplacer("{{", left, "}}", right).Replace("write the value itself, {{ env \"NAME\" }} for " +
		"a variable of the task, or {{ file \"/path\" }} for what a file of this machine holds; set left_delimiter " +
		"and right_delimiter if {{ is part of the text")
	atStart := func(string) string { return "" } // render replaces it
	t.body, err = template.New(b.Destination).Delims(left, right).Option("missingkey=error").
		Funcs(template.FuncMap{"env": atStart, "file": atStart}).Parse(*b.Data)
	if err != nil {
		return t, registry.Errorf(registry.ErrUnsupported, "%w; %s", err, t.advice)
	}
	return t, nil
}

// path returns the destination relative to the task's directory.
func (t fileTemplate) path(references map[string]string) (string, error) {
	relative := map[string]string{}
	maps.Copy(relative, references)
	relative["NOMAD_TASK_DIR"], relative["NOMAD_SECRETS_DIR"], relative["NOMAD_ALLOC_DIR"] = "local", "secrets", "alloc"
	path := filepath.Clean(strings.TrimLeft(hooks.Expand(t.destination, relative), "/"))
	if !filepath.IsLocal(path) {
		return "", registry.Invalid("template %s: it leads out of the task's directory; write it to local/ or secrets/",
			t.destination)
	}
	return path, nil
}

// render executes the template. known has the values for env. An error is permanent, unless a file cannot be read.
func (t fileTemplate) render(ctx context.Context, known map[string]string) (string, error) {
	out, unreadable := boundedText{destination: t.destination}, false
	err := t.body.Funcs(template.FuncMap{
		"env": func(name string) (string, error) {
			value, set := known[name]
			if !set {
				return "", registry.Invalid("the task has no variable %s", name)
			}
			return value, nil
		},
		"file": func(path string) (string, error) {
			text, err := secretfile.Read(ctx, path)
			if err != nil {
				unreadable = true
				return "", errors.New(err.Error()) // no kind: the restart policy decides
			}
			return string(text), nil
		},
	}).Execute(&out, nil)
	if err != nil && !unreadable && !errors.Is(err, registry.ErrInvalid) {
		err = registry.Invalid("%w; %s", err, t.advice)
	}
	return out.text.String(), err
}

// maxText bounds the text of a template, in bytes.
const maxText = 1 << 20

// boundedText is the text of a template that is being executed. It ends a template that writes in an endless loop.
type boundedText struct {
	destination string // of the template
	text        strings.Builder
}

func (b *boundedText) Write(p []byte) (int, error) {
	if b.text.Len()+len(p) > maxText {
		return 0, registry.Invalid("template %s: its text is longer than %d bytes", b.destination, maxText)
	}
	return b.text.Write(p)
}

// renderTemplates returns the files of templates. It adds the variables of templates to env and to references, for
// the templates that follow.
func renderTemplates(
	ctx context.Context, list []fileTemplate, env, references map[string]string,
) (files []taskdriver.File, err error) {
	for _, t := range list {
		path, err := t.path(references)
		if err != nil {
			return nil, err
		}
		text, err := t.render(ctx, references)
		if err != nil {
			return nil, err
		}
		if t.env {
			vars, err := variablesOf(text)
			if err != nil {
				return nil, registry.Invalid("template %s: %w", t.destination, err)
			}
			maps.Copy(env, vars) // without expansion: a password may contain "${"
		}
		maps.Copy(references, env)
		if f := (taskdriver.File{Path: path, Mode: t.mode, Data: []byte(text)}); !t.env || f.Own() {
			files = append(files, f)
		}
	}
	return files, nil
}

// variablesOf parses lines of NAME=value, NAME="value" or NAME='value', and skips empty lines and comments. Its
// errors contain no value.
func variablesOf(text string) (map[string]string, error) {
	out := map[string]string{}
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		name, value, found := strings.Cut(strings.TrimPrefix(line, "export "), "=")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		var err error
		switch {
		case !found || name == "" || strings.ContainsAny(name, " \t\"'"):
			err = fmt.Errorf("no NAME=value")
		case strings.HasPrefix(value, `"`):
			value, err = strconv.Unquote(value)
		case strings.HasPrefix(value, "'"):
			if value, found = strings.CutSuffix(value[1:], "'"); !found || strings.Contains(value, "'") {
				err = fmt.Errorf("the value does not end with its first '")
			}
		default:
			value, _, _ = strings.Cut(value, " #")
			value = strings.TrimSpace(value)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %v; env = true takes lines such as NAME=value", i+1, err)
		}
		out[name] = value
	}
	return out, nil
}

// fixedFile returns the file of the template without its text. fixed is false if the template writes no file, or if the
// destination depends on the alloc.
func (t fileTemplate) fixedFile() (f taskdriver.File, fixed bool) {
	path, err := t.path(nil)
	f = taskdriver.File{Path: path}
	return f, t.destination != "" && err == nil && !strings.Contains(path, "${") && (!t.env || f.Own())
}
