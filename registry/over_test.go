package registry_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// few is one of few ids, of which one is a prefix of the other.
func few[T ~string](r *rand.Rand, kind string) T {
	return T(fmt.Sprintf("%s%s", kind, []string{"", "1", "12"}[r.IntN(3)]))
}

func someVolume(r *rand.Rand) registry.VolumeKey {
	return registry.VolumeKey{Plugin: few[registry.PluginID](r, "p"), External: few[registry.ExternalID](r, "x")}
}

// someRecord is a record of any bucket, of few keys.
func someRecord(r *rand.Rand, version int) registry.Record {
	note := fmt.Sprint(version)
	claim := registry.ClaimKey{Volume: someVolume(r), Alloc: few[registry.AllocID](r, "a"), Request: few[registry.RequestName](r, "r")}
	switch registry.Buckets[r.IntN(len(registry.Buckets))] {
	case registry.BucketInstances:
		return registry.Instance{InstanceKey: registry.InstanceKey{
			Role: few[registry.Role](r, "role"), Plugin: few[registry.PluginID](r, "p"), Alloc: few[registry.AllocID](r, "a"), Task: "t",
		}, Fingerprint: registry.Fingerprint{Provider: note}}
	case registry.BucketTasks:
		return registry.Task{TaskKey: registry.TaskKey{Alloc: few[registry.AllocID](r, "a"), Task: few[registry.TaskName](r, "t")}, Attempt: uint64(version)}
	case registry.BucketAllocs:
		return registry.Alloc{ID: few[registry.AllocID](r, "a"), Job: note}
	case registry.BucketVolumes:
		key := someVolume(r)
		spec := registry.VolumeSpec{Namespace: "n", ID: few[registry.VolumeID](r, "v"), Plugin: key.Plugin, External: key.External, FSType: note}
		spec.Name = few[string](r, "m")
		v := registry.Volume{VolumeSpec: spec, Created: r.IntN(3) > 0}
		if r.IntN(4) == 0 {
			v.External = "" // its plugin has not named it yet
		}
		if r.IntN(4) == 0 {
			v.Created, v.Ephemeral, v.Owner = false, true, few[registry.AllocID](r, "a")
			v.ID = registry.InlineID(v.Owner, few[registry.RequestName](r, "r"))
		}
		return v
	case registry.BucketClaims:
		return registry.Claim{Volume: claim.Volume, Alloc: claim.Alloc, Request: claim.Request, Node: registry.NodeName(note)}
	case registry.BucketPlacements:
		return registry.Placement{Volume: claim.Volume, Boot: note}
	case registry.BucketRefs:
		return registry.Ref{Volume: claim.Volume, Alloc: claim.Alloc, Request: claim.Request, Boot: note}
	case registry.BucketIntents:
		return registry.Intent{Volume: claim.Volume, Hash: note}
	}
	return registry.Operation{ID: few[registry.OperationID](r, "o"), Digest: note}
}

func someChange(r *rand.Rand, version int, instances bool) (c registry.Change) {
	seen := map[registry.Key]bool{}
	for range r.IntN(8) {
		record := someRecord(r, version)
		if seen[record.Key()] || !instances && record.Key().Bucket == registry.BucketInstances {
			continue
		}
		seen[record.Key()] = true
		if r.IntN(3) == 0 {
			c.Delete = append(c.Delete, record.Key())
		} else {
			c.Put = append(c.Put, record)
		}
	}
	for range r.IntN(2) {
		c.Events = append(c.Events, registry.Event{Kind: registry.EventStaged, Detail: fmt.Sprint(version)})
	}
	return c
}

// all is everything that a View tells, without indexes.
func all(v registry.View) map[string]any {
	out := map[string]any{
		"instances": bare(v.AllInstances()), "tasks": bare(v.Tasks()), "allocs": bare(v.Allocs()), "volumes": bare(v.Volumes()),
		"claims": bare(v.AllClaims()), "placements": bare(v.Placements()), "refs": bare(v.AllRefs()), "intents": bare(v.Intents()),
		"long allocs":   bare(v.AllocsWhere(func(a registry.Alloc) bool { return len(a.ID) > 1 })),
		"named volumes": bare(v.VolumesWhere(func(v registry.Volume) bool { return v.External != "" })),
	}
	for _, n := range []string{"", "1", "12"} {
		alloc := registry.AllocID("a" + n)
		out["alloc "+n] = found(v.Alloc(alloc))
		out["claims of "+n] = bare(v.ClaimsOf(alloc))
		out["volumes of "+n] = bare(v.VolumesOf(alloc))
		out["volume "+n] = found(v.Volume(registry.VolumeName{Namespace: "n", ID: registry.VolumeID("v" + n)}))
		out["operation "+n] = found(v.Operation(registry.OperationID("o" + n)))
		for _, m := range []string{"", "1", "12"} {
			key := registry.VolumeKey{Plugin: registry.PluginID("p" + n), External: registry.ExternalID("x" + m)}
			both := n + " " + m
			out["volume by key "+both] = found(v.VolumeByKey(key))
			out["volumes named "+both] = bare(v.VolumesNamed(key.Plugin, "m"+m))
			out["claims "+both] = bare(v.Claims(key))
			out["placement "+both] = found(v.Placement(key))
			out["refs "+both] = bare(v.Refs(key))
			out["intent "+both] = found(v.Intent(key))
			out["task "+both] = found(v.Task(registry.TaskKey{Alloc: alloc, Task: registry.TaskName("t" + m)}))
			out["instances "+both] = bare(v.Instances(registry.Role("role"+n), registry.PluginID("p"+m)))
			out["instance "+both] = found(v.Instance(registry.InstanceKey{Role: "role", Plugin: registry.PluginID("p" + n), Alloc: registry.AllocID("a" + m), Task: "t"}))
		}
	}
	return out
}

func bare[R registry.Record](records []R) (out []registry.Record) {
	for _, r := range records {
		out = append(out, r.Indexed(1, 1))
	}
	return out
}

func found[R registry.Record](r R, is bool) any {
	if !is {
		return nil
	}
	return r.Indexed(1, 1)
}

// A View under a change shows what the Log shows once it is committed; and two changes in one do what they do one after the other.
func TestOverAndThen(t *testing.T) {
	look := func(log registry.State, read func(registry.View)) {
		must(t, log.View(t.Context(), func(v registry.View) error { read(v); return nil }))
	}
	commit := func(log registry.State, c registry.Change) {
		_, err := log.Commit(context.Background(), func(registry.View) (registry.Change, error) { return c, nil })
		must(t, err)
	}
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 0))
		log, other := registrytest.NewLog(now), registrytest.NewLog(now)
		for version := range 6 {
			c, next := someChange(r, 2*version, true), someChange(r, 2*version+1, false) // whose age would differ
			var over, overBoth, after, afterBoth, otherwise map[string]any
			look(log, func(v registry.View) {
				over, overBoth = all(registry.Over(v, c)), all(registry.Over(registry.Over(v, c), next))
			})
			commit(log, c)
			look(log, func(v registry.View) { after = all(v) })
			commit(log, next)
			look(log, func(v registry.View) { afterBoth = all(v) })
			commit(other, c.Then(next))
			look(other, func(v registry.View) { otherwise = all(v) })
			same := func(what string, got, want map[string]any) {
				for name := range want {
					if !reflect.DeepEqual(got[name], want[name]) {
						t.Fatalf("seed %d, %s, %s:\n %v\nwant\n %v\nafter %+v\nand %+v", seed, what, name, got[name], want[name], c, next)
					}
				}
			}
			same("over one", over, after)
			same("over two", overBoth, afterBoth)
			same("two in one", otherwise, afterBoth)
			if got := c.Then(next).Events; len(got) != len(c.Events)+len(next.Events) || len(c.Events) > 0 && got[0] != c.Events[0] {
				t.Fatalf("events %v of %v and %v", got, c.Events, next.Events)
			}
		}
	}
}
