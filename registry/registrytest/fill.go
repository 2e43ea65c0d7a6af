package registrytest

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"holdfast/registry"
)

// Filled returns a value of type T whose fields are all set, with one element in each list and map. Values of different
// seeds differ. With it, tests cover fields that are added later.
func Filled[T any](t testing.TB, seed int) T {
	t.Helper()
	var v T
	n := seed * 1000
	fill(t, reflect.ValueOf(&v).Elem(), &n)
	return v
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
	v, n := reflect.New(b.Type().GoType).Elem(), seed*1000
	fill(t, v, &n)
	return v.Interface().(registry.Record)
}

func fill(t testing.TB, v reflect.Value, n *int) {
	t.Helper()
	*n++
	if v.Type() == reflect.TypeFor[time.Time]() {
		v.Set(reflect.ValueOf(time.Date(2026, 1, 2, 3, 4, 5, *n, time.UTC)))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprintf("text-%d", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8:
		v.SetUint(uint64(*n%255 + 1))
	case reflect.Uint, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n))
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(int64(*n))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(t, v.Index(0), n)
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, key, n)
		fill(t, value, n)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).Tag.Get("json") != "-" { // else it is not stored
				fill(t, v.Field(i), n)
			}
		}
	default:
		t.Fatalf("%s: no rule for a field of this kind; add one", v.Type())
	}
}

// Zeros returns the paths of all zero fields in v.
func Zeros(v any) []string { return zeros("", reflect.ValueOf(v)) }

func zeros(path string, v reflect.Value) []string {
	if v.IsZero() {
		return []string{path}
	}
	var found []string
	switch v.Kind() {
	case reflect.Pointer:
		found = zeros(path, v.Elem())
	case reflect.Slice:
		for i := range v.Len() {
			found = append(found, zeros(fmt.Sprintf("%s[%d]", path, i), v.Index(i))...)
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			found = append(found, zeros(fmt.Sprintf("%s[%v]", path, k), v.MapIndex(k))...)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return nil
		}
		for i := range v.NumField() {
			if field := v.Type().Field(i); field.Tag.Get("json") != "-" {
				found = append(found, zeros(path+"."+field.Name, v.Field(i))...)
			}
		}
	}
	return found
}
