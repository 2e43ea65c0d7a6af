package bootstrap

// versions are the versions of the wire protocol that this build speaks, as host and as shim. Hello negotiates features
// within a version.
var versions = []int{1}
