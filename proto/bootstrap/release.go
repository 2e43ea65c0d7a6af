//go:build !next

package bootstrap

// versions are the versions of the wire envelope that this build speaks, as host and as shim. Features within a version
// are told by Hello, not by a new number.
var versions = []int{1}
