package store

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"sync"

	"holdfast/registry"
)

// shape describes the part of a JSON value that this build knows: the names in an object, and the shapes of their
// values. merge replaces a value of nil shape as a whole.
type shape struct {
	fields map[string]*shape // of a struct, by name
	each   *shape            // of the elements of a map or list
	list   bool              // each is for a list
}

var shapes sync.Map // reflect.Type -> *shape

func shapeOf(t reflect.Type) *shape {
	if known, ok := shapes.Load(t); ok {
		return known.(*shape)
	}
	s := newShape(t)
	shapes.Store(t, s)
	return s
}

var (
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
	textMarshaler = reflect.TypeFor[interface{ MarshalText() ([]byte, error) }]()
)

func newShape(t reflect.Type) *shape {
	if t.Implements(jsonMarshaler) || t.Implements(textMarshaler) {
		return nil
	}
	switch t.Kind() {
	case reflect.Pointer:
		return newShape(t.Elem())
	case reflect.Map, reflect.Slice:
		if each := newShape(t.Elem()); each != nil {
			return &shape{each: each, list: t.Kind() == reflect.Slice}
		}
	case reflect.Struct:
		s := &shape{fields: map[string]*shape{}}
		s.addFields(t)
		return s
	}
	return nil
}

func (s *shape) addFields(t reflect.Type) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && name == "" && f.Type.Kind() == reflect.Struct:
			s.addFields(f.Type)
		case name == "-" || !f.IsExported():
		case name == "":
			s.fields[f.Name] = newShape(f.Type)
		default:
			s.fields[name] = newShape(f.Type)
		}
	}
}

// knows reports whether encoding/json, which ignores case, would decode name into a field.
func (s *shape) knows(name string) bool {
	if _, ok := s.fields[name]; ok {
		return true
	}
	for known := range s.fields {
		if strings.EqualFold(known, name) {
			return true
		}
	}
	return false
}

// mergedText returns the JSON of a record with the parts of old that this build does not know.
func mergedText(record registry.Record, old []byte) ([]byte, error) {
	text, err := json.Marshal(record)
	if err != nil {
		return nil, err
	}
	return merge(shapeOf(record.Key().Bucket.Type().GoType), old, text), nil
}

// merge returns text, and adds the parts of old that the shape does not know, because a later build has written them. A
// part that the shape knows is as in text, even if it is missing there.
func merge(s *shape, old, text json.RawMessage) json.RawMessage {
	switch {
	case s == nil || len(old) == 0:
		return text
	case s.list:
		return mergeList(s, old, text)
	}
	var was, is map[string]json.RawMessage
	if json.Unmarshal(old, &was) != nil || json.Unmarshal(text, &is) != nil || is == nil {
		return text
	}
	changed := false
	for name, value := range was {
		into, known := s.member(name)
		now, present := is[name]
		switch {
		case !known:
			is[name], changed = value, true
		case present:
			merged := merge(into, value, now)
			changed = changed || !bytes.Equal(merged, now)
			is[name] = merged
		}
	}
	if !changed {
		return text
	}
	return encode(is)
}

// member returns the shape of an object's member, and whether the shape knows its name. A map's shape knows every name.
func (s *shape) member(name string) (*shape, bool) {
	if s.fields == nil {
		return s.each, true
	}
	return s.fields[name], s.knows(name)
}

// mergeList keeps the unknown parts of elements that are otherwise unchanged and at the same position as before. It
// cannot recognize a moved or changed element.
func mergeList(s *shape, old, text json.RawMessage) json.RawMessage {
	var was, is []json.RawMessage
	if json.Unmarshal(old, &was) != nil || json.Unmarshal(text, &is) != nil {
		return text
	}
	changed := false
	for i := range min(len(was), len(is)) {
		merged := merge(s.each, was[i], is[i])
		if equalJSON(merged, was[i]) && !bytes.Equal(merged, is[i]) {
			is[i], changed = merged, true
		}
	}
	if !changed {
		return text
	}
	return encode(is)
}

func equalJSON(a, b json.RawMessage) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

// encode encodes a value that was decoded from JSON.
func encode(v any) json.RawMessage {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return text
}
