package registry

import "maps"

// shardCount bounds what one change copies: the array of shards, and each shard that it touches.
const shardCount = 256

// shards is an immutable map in two levels. Its next version shares every shard that a change does not touch.
type shards[K ~string, V any] struct{ maps *[shardCount]map[K]V }

func newShards[K ~string, V any]() shards[K, V] { return shards[K, V]{new([shardCount]map[K]V)} }

func (s shards[K, V]) get(k K) V { return s.maps[shardOf(k)][k] }

func (s shards[K, V]) all(yield func(K, V) bool) {
	for _, m := range s.maps {
		for k, v := range m {
			if !yield(k, v) {
				return
			}
		}
	}
}

// shardOf is FNV-1a, folded to a byte.
func shardOf[K ~string](k K) uint8 {
	h := uint32(2166136261)
	for i := range len(k) {
		h = (h ^ uint32(k[i])) * 16777619
	}
	return uint8(h ^ h>>8 ^ h>>16 ^ h>>24)
}

// shardEdit is the next version in the making. It is used by one goroutine, until next is published.
type shardEdit[K ~string, V any] struct {
	next  shards[K, V]
	owned [shardCount]bool
}

func (s shards[K, V]) edit() *shardEdit[K, V] {
	copied := *s.maps
	return &shardEdit[K, V]{next: shards[K, V]{&copied}}
}

func (e *shardEdit[K, V]) set(k K, v V) { e.own(k)[k] = v }
func (e *shardEdit[K, V]) drop(k K)     { delete(e.own(k), k) }

func (e *shardEdit[K, V]) own(k K) map[K]V {
	at := shardOf(k)
	if !e.owned[at] {
		e.owned[at] = true
		if e.next.maps[at] = maps.Clone(e.next.maps[at]); e.next.maps[at] == nil {
			e.next.maps[at] = map[K]V{}
		}
	}
	return e.next.maps[at]
}
