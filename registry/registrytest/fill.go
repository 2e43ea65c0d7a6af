package registrytest

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"holdfast/registry"
)

// Filled returns a value of type T whose fields are all set, with one element in each list and map. Fields that JSON
// omits are not set. Values of different seeds differ. With it, tests cover fields that are added later.
func Filled[T any](t testing.TB, seed int) T { return filled[T](t, filler{n: seed * 1000}) }

// FilledWhole is Filled with two elements in each list. It also sets fields that JSON omits.
func FilledWhole[T any](t testing.TB) T { return filled[T](t, filler{whole: true}) }

func filled[T any](t testing.TB, f filler) (value T) {
	t.Helper()
	f.fill(t, reflect.ValueOf(&value).Elem())
	return value
}

// Record returns a record of the bucket with every field set that a record of the bucket may have.
func Record(t testing.TB, b registry.Bucket, seed int) registry.Record {
	t.Helper()
	switch b {
	case registry.BucketVolumes:
		v := Filled[registry.Volume](t, seed)
		v.Ephemeral = false
		return v
	case registry.BucketInlineVolumes:
		v := Filled[registry.Volume](t, seed)
		v.Created = false
		return v
	case registry.BucketSnapshots:
		s := Filled[registry.VolumeSnapshot](t, seed)
		s.Volumes, s.Members = nil, nil
		return s
	case registry.BucketNodeIntents:
		i := Filled[registry.Intent](t, seed)
		i.RPC = registry.NodeStageRPC
		return i
	}
	v, f := reflect.New(b.Type().GoType).Elem(), filler{n: seed * 1000}
	f.fill(t, v)
	return v.Interface().(registry.Record)
}

// filler sets fields to values that it has not used before.
type filler struct {
	n     int
	whole bool // for FilledWhole
}

func (f *filler) fill(t testing.TB, v reflect.Value) {
	t.Helper()
	f.n++
	if v.Type() == reflect.TypeFor[time.Time]() {
		v.Set(reflect.ValueOf(time.Date(2026, 1, 2, 3, 4, 5, f.n, time.UTC)))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprintf("text-%d", f.n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8:
		v.SetUint(uint64(f.n%255 + 1))
	case reflect.Uint, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(f.n))
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(int64(f.n))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.fill(t, v.Elem())
	case reflect.Slice:
		n := 1
		if f.whole {
			n = 2
		}
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			f.fill(t, v.Index(i))
		}
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		f.fill(t, key)
		f.fill(t, value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			if f.whole || v.Type().Field(i).Tag.Get("json") != "-" {
				f.fill(t, v.Field(i))
			}
		}
	default:
		t.Fatalf("%s: no rule for a field of this kind; add one", v.Type())
	}
}
