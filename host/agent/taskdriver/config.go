package taskdriver

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"holdfast/internal/mount"
	"holdfast/registry"
)

// Scalar is a string, number or bool in a job, as text, because HCL converts between these types.
type Scalar string

func (v *Scalar) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err == nil {
		*v = Scalar(s)
		return nil
	}
	if text := string(b); !strings.ContainsAny(text[:1], "{[") && text != "null" {
		*v = Scalar(text)
		return nil
	}
	return registry.Invalid("%s is not a string", b)
}

// configErrors are all errors in a config block.
type configErrors []error

func (e configErrors) Error() string {
	var texts []string
	for _, one := range e {
		texts = append(texts, one.Error())
	}
	return strings.Join(texts, "; ")
}

func (e configErrors) Unwrap() []error { return e }

// EachError returns the individual errors in an error of Driver.Configure.
func EachError(err error) []error {
	if list, is := errors.AsType[configErrors](err); is {
		return list
	}
	return []error{err}
}

// Decode decodes a part of a job that travels as JSON. Errors begin with what, the name of the part. Each attribute of
// a struct is decoded by itself, so that an error of one hides no others.
func Decode(what string, text json.RawMessage, into any) error {
	if len(text) == 0 {
		return nil
	}
	var attributes map[string]json.RawMessage
	if reflect.TypeOf(into).Elem().Kind() != reflect.Struct || json.Unmarshal(text, &attributes) != nil {
		return decode(what, what, text, into)
	}
	var errs configErrors
	for _, name := range slices.Sorted(maps.Keys(attributes)) {
		one, err := json.Marshal(map[string]json.RawMessage{name: attributes[name]})
		if err == nil {
			err = decode(what, what+": "+name, one, into)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	if errs == nil {
		return nil
	}
	return errs
}

// decode decodes text. Errors that json does not ascribe to a field begin with name.
func decode(what, name string, text json.RawMessage, into any) error {
	err := json.Unmarshal(text, into)
	if e, is := errors.AsType[*json.UnmarshalTypeError](err); is {
		want := "a string"
		switch kind := e.Type.Kind(); {
		case kind == reflect.Map, kind == reflect.Struct,
			kind == reflect.Slice && e.Type.Elem().Kind() == reflect.Struct:
			want = "a block, { ... }"
		case kind == reflect.Slice:
			want = "a list, [ ... ]"
		case kind == reflect.Bool:
			want = "true or false"
		case kind >= reflect.Int && kind <= reflect.Uint64:
			want = "a whole number"
		}
		return registry.Invalid("%s: %s cannot be a JSON %s; write %s", what, e.Field, e.Value, want)
	}
	if err != nil {
		return registry.Invalid("%s: %w", name, err)
	}
	return nil
}

// unknownKeys returns a warning for each key of a config block, or of blocks in it, for which the struct type T has no
// field with this JSON name.
func unknownKeys[T any](driver string, config json.RawMessage) (warnings []string) {
	for _, name := range Unknown[T]("", config) {
		warnings = append(warnings, fmt.Sprintf("config attribute %s has no effect with driver %s", name, driver))
	}
	return warnings
}

// Unknown returns the sorted keys of a block, or of a list of blocks, for which the struct type T has no field with
// this JSON name.
func Unknown[T any](prefix string, blocks json.RawMessage) []string {
	return slices.Compact(slices.Sorted(slices.Values(unknownIn(reflect.TypeFor[T](), prefix, blocks))))
}

// unknownIn returns the keys of an object, or of the objects in a list, for which the struct type has no field.
func unknownIn(t reflect.Type, prefix string, text json.RawMessage) (unknown []string) {
	var list []json.RawMessage
	if json.Unmarshal(text, &list) != nil {
		list = []json.RawMessage{text}
	}
	for _, item := range list {
		var keys map[string]json.RawMessage
		if json.Unmarshal(item, &keys) != nil {
			continue
		}
		for _, f := range reflect.VisibleFields(t) {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if f.Type.Kind() == reflect.Slice && f.Type.Elem().Kind() == reflect.Struct {
				unknown = append(unknown, unknownIn(f.Type.Elem(), prefix+name+".", keys[name])...)
			}
			delete(keys, name)
		}
		for name := range keys {
			unknown = append(unknown, prefix+name)
		}
	}
	return unknown
}

// execConfig is the config block of exec and raw_exec.
type execConfig struct {
	Command string   `json:"command"`
	Args    []Scalar `json:"args"`
	WorkDir string   `json:"work_dir"`
}

// Configure reads command, args and work_dir. With TryLimits it tries the limits of the task's resources, and warns of
// those that this process cannot enforce. Without TryLimits it warns of limits that nothing on this machine can
// enforce, but only if the task has no ID: it is then being checked, not started.
func (r runner) Configure(t *Task, config json.RawMessage) (warnings []string, err error) {
	var c execConfig
	if err := Decode("config", config, &c); err != nil {
		return nil, err
	}
	if c.Command == "" {
		return nil, registry.Invalid("no command; driver %s needs config { command = ... }", r.name)
	}
	t.Command, t.WorkDir, t.Args = c.Command, c.WorkDir, toStrings(c.Args)
	warnings = unknownKeys[execConfig](r.name, config)
	if err := t.checkFiles(false); err != nil {
		return warnings, err
	}
	switch {
	case t.TryLimits:
		warnings = append(warnings, tryLimits(t.Resources)...)
	case t.ID == "":
		if table, err := mount.Table(0); err == nil {
			warnings = append(warnings, missingControllers(t.Resources, table)...)
		}
	}
	return warnings, nil
}

func toStrings(list []Scalar) (out []string) {
	for _, v := range list {
		out = append(out, string(v))
	}
	return out
}
