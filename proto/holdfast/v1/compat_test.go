package holdfastv1_test

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "holdfast/proto/holdfast/v1"
)

var update = flag.Bool("update", false, "rewrite the golden file")

// The API as it stands, one line for each field, enum value and method. A line that goes away or changes is a break:
// fields are never removed or renumbered.
func TestNothingIsRemovedOrRenumbered(t *testing.T) {
	const golden = "testdata/api.golden"
	now := describe()
	if *update {
		if err := os.WriteFile(golden, []byte(strings.Join(now, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	was := strings.Split(strings.TrimSpace(string(text)), "\n")
	for _, line := range was {
		if !slices.Contains(now, line) {
			t.Errorf("removed or changed: %s", line)
		}
	}
	for _, line := range now {
		if !slices.Contains(was, line) {
			t.Errorf("new: %s (go test ./proto/holdfast/v1 -update)", line)
		}
	}
}

// Zero of every enum means unspecified.
func TestEnumZeroIsUnspecified(t *testing.T) {
	protoregistry.GlobalTypes.RangeEnums(func(e protoreflect.EnumType) bool {
		if d := e.Descriptor(); d.ParentFile().Package() == "holdfast.v1" {
			if zero := d.Values().ByNumber(0); zero == nil || !strings.HasSuffix(string(zero.Name()), "_UNSPECIFIED") {
				t.Errorf("%s: zero is %v", d.FullName(), zero)
			}
		}
		return true
	})
}

// Every request of a service begins with a Call, every reply with an Answer: operation ids and indexes are everywhere
// from the first day.
func TestEveryRequestIsACall(t *testing.T) {
	each(func(f protoreflect.FileDescriptor) {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			if s.Name() == "Callbacks" {
				continue // the other way round: the shim asks
			}
			for j := range s.Methods().Len() {
				m := s.Methods().Get(j)
				if first := m.Input().Fields().ByNumber(1); first == nil || first.Message() == nil ||
					first.Message().Name() != "Call" {
					t.Errorf("%s: field 1 of its request is not a Call", m.FullName())
				}
				if first := m.Output().Fields().ByNumber(1); first == nil || first.Message() == nil ||
					first.Message().Name() != "Answer" {
					t.Errorf("%s: field 1 of its reply is not an Answer", m.FullName())
				}
			}
		}
	})
}

func each(fn func(protoreflect.FileDescriptor)) {
	protoregistry.GlobalFiles.RangeFilesByPackage("holdfast.v1", func(f protoreflect.FileDescriptor) bool {
		fn(f)
		return true
	})
}

func describe() (lines []string) {
	each(func(f protoreflect.FileDescriptor) {
		for i := range f.Messages().Len() {
			m := f.Messages().Get(i)
			for j := range m.Fields().Len() {
				d := m.Fields().Get(j)
				lines = append(lines, fmt.Sprintf("%s %d %s %s", d.FullName(), d.Number(), d.Cardinality(), kind(d)))
			}
		}
		for i := range f.Enums().Len() {
			for j := range f.Enums().Get(i).Values().Len() {
				v := f.Enums().Get(i).Values().Get(j)
				lines = append(lines, fmt.Sprintf("%s %d", v.FullName(), v.Number()))
			}
		}
		for i := range f.Services().Len() {
			for j := range f.Services().Get(i).Methods().Len() {
				m := f.Services().Get(i).Methods().Get(j)
				lines = append(lines, fmt.Sprintf("%s(%s stream=%t) %s stream=%t", m.FullName(), m.Input().Name(),
					m.IsStreamingClient(),
					m.Output().Name(), m.IsStreamingServer()))
			}
		}
	})
	slices.Sort(lines)
	return lines
}

func kind(d protoreflect.FieldDescriptor) string {
	switch {
	case d.IsMap():
		return "map<" + kind(d.MapKey()) + "," + kind(d.MapValue()) + ">"
	case d.Message() != nil:
		return string(d.Message().FullName())
	case d.Enum() != nil:
		return string(d.Enum().FullName())
	}
	return d.Kind().String()
}
