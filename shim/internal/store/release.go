//go:build !next

package store

// Newest is what this release writes. The file beside this one, release_next.go, is the release after it.
const Newest = 1

var released = schema{oldest: Oldest, newest: Newest, readable: Oldest}
