package registry_test

import (
	"fmt"
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

const many = 10_000

// full is a table of many instances of many/4 plugins, and the number of its last change.
func full(t testing.TB) (*writer, registry.Seq) {
	t.Helper()
	r := newWriter(registrytest.NewLog(now), now)
	var c registry.Change
	for n := range many {
		k := key("r", registry.PluginID(fmt.Sprint("plugin-", n/4)), registry.AllocID(fmt.Sprint("alloc-", n)))
		c.Put = append(c.Put, registry.Indexed(instance(k, registry.Healthy), 0, registry.Seq(n+1)))
	}
	r.Applied(registry.Applied{Index: many, Change: c})
	return r, many
}

func TestReadsAllocateLittle(t *testing.T) {
	r, _ := full(t)
	r.All()
	for name, c := range map[string]struct {
		read func()
		most float64
	}{
		"Find": {func() { r.Find("r", "plugin-17") }, 0},
		"Get":  {func() { r.Get(key("r", "plugin-17", "alloc-70")) }, 0},
		"All":  {func() { r.All() }, 1},
	} {
		if n := testing.AllocsPerRun(5, c.read); n > c.most {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}

// BenchmarkPut is a whole put, with the log in memory.
func BenchmarkPut(b *testing.B) {
	log := registrytest.NewLog(now)
	log.KeepEvents(100)
	r := newWriter(log, now)
	log.OnApplied(r.Applied)
	var list []registry.Instance
	for n := range many {
		list = append(list, instance(key("r", registry.PluginID(fmt.Sprint("plugin-", n/4)),
			registry.AllocID(fmt.Sprint("alloc-", n))), registry.Healthy))
	}
	if _, err := r.PutAll(b.Context(), list...); err != nil {
		b.Fatal(err)
	}
	i, n := list[0], uint64(1)
	for b.Loop() {
		n++
		i.Attempt = n
		if _, err := r.Put(b.Context(), i); err != nil {
			b.Fatal(err)
		}
	}
}
